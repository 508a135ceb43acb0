"""DraftExpert's platforms, simulated from a run's own recorded routing: rows for tables 2 to 4. Imports no torch.

What the resident run recorded is priced at the geometry of the paper's first target on its two platforms (`recipes/
platforms`). Blocks drafted to the full K are cut to the settings that the tables compare (`moexp.sim.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moexp.papers import load_paper
from moexp.runtime.recording.files import ROUTING, read_recording
from moexp.runtime.store.counters import StoreCounters
from moexp.sim.adapt import Simulated, load_simulated
from moexp.sim.blocks import Blocks, Setting, fixed_methods, recorded_blocks
from moexp.sim.cold import open_machine
from moexp.sim.simulate import cache_policy, no_collection
from moexp.sim.walk import Cycle, Step
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, View, text
from moexp.tables.core.tags import PAPER, SIMULATED
from moexp.tables.draftexpert.labels import (
    AR,
    DRAFT_TOKENS,
    FIXED,
    FULL,
    RESIDENT,
    SHORT,
    TOP_R,
    TRUNCATED,
    settings_text,
)

if TYPE_CHECKING:
    from moexp.tables.draftexpert.data import Run

PLATFORMS = ("cg", "mn")
DRAFTERS = {**{name: name for name in TOP_R.values()}, "draft-expert": FIXED}
POLICIES = {
    "ar": AR,
    "fixed": FIXED,
    "confidence-expansion": TRUNCATED,
    "confidence-expansion+prefetch": FULL,
}


@dataclass(frozen=True)
class SimulatedArm:
    """One method on one platform, summed over its cycles.

    Attributes:
        settings: in short, as in the tables.
        whole, whole_draft_s: blocks of the full K, and seconds that drafting them took.
    """

    settings: str | None
    cycles: int
    tokens: int
    draft_s: float
    verify_s: float
    whole: int
    whole_draft_s: float
    counters: StoreCounters

    @property
    def seconds(self) -> float:
        """All cycles."""
        return self.draft_s + self.verify_s


@dataclass(frozen=True)
class SimulatedRun:
    """One platform's methods, by label."""

    platform: str
    model: str
    arms: dict[str, SimulatedArm]


def simulate_run(folder: Path, platforms: Sequence[Measured]) -> list[SimulatedRun]:
    """The paper's platforms, from a run folder's resident recording; empty where there is none.

    Args:
        platforms: measured ones; their settings of the full method are simulated.
    """
    place = folder / RESIDENT
    if not (place / ROUTING).exists():
        return []
    recording = read_recording(place)
    labels = [label for label in (*TOP_R.values(), FIXED) if label in fixed_methods(recording)]
    if FIXED not in labels:
        return []
    runs = []
    for name in PLATFORMS:
        simulated = load_simulated(name, recording.info.geometry, 0)
        blocks = {label: recorded_blocks(recording, label, simulated.moe_layers) for label in labels}
        mine = blocks[FIXED]
        fixed = Setting(max_draft=min(DRAFT_TOKENS, mine.longest))
        arms = {AR: _arm(simulated, mine.ar(), None)}
        for label in labels:
            arms[label] = _arm(simulated, blocks[label].cycles(fixed), f"K={fixed.max_draft}")
        for label in (TRUNCATED, FULL):
            known = _setting(platforms, label, mine)
            if known is not None:
                arms[label] = _arm(simulated, mine.cycles(known[0], simulated.machine.capacity), known[1])
        runs.append(SimulatedRun(name, simulated.model, arms))
    return runs


def _setting(platforms: Sequence[Measured], label: str, blocks: Blocks) -> tuple[Setting, str | None] | None:
    """A method's settings as it was measured, its K at most as long as what was recorded."""
    for platform in platforms:
        for kept in platform.settings.get("methods", []):
            if kept["name"] == label:
                names = ("policy", "tau", "budget", "prefetch", "prefetch_top", "prefetch_inline")
                longest = min(kept["max_draft"], blocks.longest)
                said = settings_text(platform, label) or ""
                said = said.replace(f"K={kept['max_draft']}", f"K={longest}")
                return Setting(max_draft=longest, **{name: kept[name] for name in names}), said
    return None


def _arm(simulated: Simulated, cycles: Sequence[Cycle], settings: str | None) -> SimulatedArm:
    machine = open_machine(simulated.machine, cache_policy(simulated.cache, cycles), cycles)
    with no_collection():
        times = machine.run_timed(cycles)
    machine.close()
    drafted = [
        sum(1 for event in cycle.events if isinstance(event, Step) and event.phase == "draft") for cycle in cycles
    ]
    whole = [took.draft_s for took, count in zip(times, drafted, strict=True) if count == DRAFT_TOKENS]
    return SimulatedArm(
        settings,
        len(cycles),
        sum(cycle.emitted for cycle in cycles),
        sum(took.draft_s for took in times),
        sum(took.verify_s for took in times),
        len(whole),
        sum(whole),
        machine.counters,
    )


# --- rows ---


def _rows(run: Run) -> list[tuple[SimulatedRun, Row]]:
    return [
        (one, {"target": f"{run.target['name']} as {one.model}", "platform": one.platform, "tag": SIMULATED})
        for one in run.simulated
    ]


def throughput_rows(run: Run) -> list[Row]:
    """Table 2: each method over all prompts."""
    rows = []
    for one, common in _rows(run):
        ar = one.arms[AR]
        for label, arm in one.arms.items():
            rate = arm.tokens / arm.seconds
            rows.append(
                common
                | {
                    "method": "draft-expert" if label == FULL else label,
                    "workload": "mean",
                    "settings": arm.settings,
                    "tokens_per_s": rate,
                    "speedup": None if label == AR else rate / (ar.tokens / ar.seconds),
                    "alpha": arm.tokens / arm.cycles,
                    "bytes_per_token": arm.counters.read_bytes / arm.tokens,
                }
            )
    return rows


def draft_rows(run: Run, counts: dict[str, Row]) -> list[Row]:
    """Table 3: what drafting a token costs over top-1.

    Args:
        counts: of each drafter, what does not depend on the platform.
    """
    rows = []
    for one, common in _rows(run):
        base = one.arms.get(TOP_R[1])
        for drafter, label in DRAFTERS.items():
            arm = one.arms.get(label)
            if arm is None or base is None or not arm.whole or not base.whole_draft_s:
                continue
            cost = (arm.whole_draft_s / arm.whole) / (base.whole_draft_s / base.whole)
            rows.append(common | counts[drafter] | {"drafter": drafter, "cost": cost})
    return rows


def verify_rows(run: Run) -> list[Row]:
    """Table 4: what verifying a block costs over an AR step."""
    rows = []
    for one, common in _rows(run):
        step_s = one.arms[AR].seconds / one.arms[AR].cycles
        for policy, label in POLICIES.items():
            arm = one.arms.get(label)
            if arm is None:
                continue
            counted = arm.counters
            row: Row = common | {
                "policy": policy,
                "settings": arm.settings,
                "verify_cost": arm.verify_s / arm.cycles / step_s,
                "cycle_cost": arm.seconds / arm.cycles / step_s,
                "alpha": arm.tokens / arm.cycles,
                "stall_s": counted.stall_s / arm.tokens,
            }
            if counted.prefetched:
                hit = counted.used / counted.prefetched
                row |= {"prefetch_hit": hit, "prefetch_waste": 1 - hit}
                row["prefetch_cancelled"] = counted.cancelled / counted.prefetched
            rows.append(row)
    return rows


# --- views ---


def beside_paper(number: int, rows: Sequence[Row], columns: Sequence[str]) -> View:
    """Simulated rows, each figure beside the paper's for the model that it is priced for.

    Args:
        number: of the table.
        columns: figures, all in the paper's table too.
    """
    (key,) = {"method", "drafter", "policy"} & set(rows[0])
    paper = load_paper("draftexpert").table(number).rows
    lines = []
    for row in rows:
        model = str(row["target"]).rpartition(" as ")[2]
        wanted: dict[str, Any] = {"target": model, "platform": str(row["platform"]).upper(), key: row[key]}
        theirs = next((one for one in paper if all(one.get(k) == value for k, value in wanted.items())), {})
        cells = [cell for column in columns for cell in (text(row.get(column)), text(theirs.get(column)))]
        lines.append([str(row["platform"]), SHORT.get(str(row[key]), str(row[key])), *cells])
    header = ["platform", key, *(cell for column in columns for cell in (column, PAPER))]
    title = f"Simulated: routing of this run, priced for {model} on the paper's platforms"
    return View(title, header, lines)


NOTE = (
    "Simulated rows replay the routing of the resident run on the paper's platforms at its model's geometry "
    "(`moexp platforms`); their constants give the paper's AR rate. Acceptance is that of our drafters. Blocks are "
    "weighed alike although a shorter one would have been followed by another."
)
