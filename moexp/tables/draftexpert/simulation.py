"""DraftExpert's platforms, simulated from a run's own recorded routing. Imports no torch.

What the resident run recorded is priced at the geometry of the paper's first target on its two platforms (`recipes/
platforms`). Blocks drafted to the full K are cut to the settings that the tables compare (`moexp.sim.routing.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moexp.runtime.recording.files import ROUTING, read_recording
from moexp.runtime.store.counters import StoreCounters
from moexp.sim.machine.cycles import Cycle, Step
from moexp.sim.machine.machine import open_machine
from moexp.sim.machine.policies import cache_policy
from moexp.sim.machine.run import no_collection
from moexp.sim.platforms.simulated import Simulated, load_simulated
from moexp.sim.routing.blocks import Blocks, Setting, fixed_methods, recorded_blocks
from moexp.tables.core.run import Measured
from moexp.tables.draftexpert.labels import AR, DRAFT_TOKENS, FIXED, FULL, RESIDENT, TOP_R, TRUNCATED, settings_text

PLATFORMS = ("cg", "mn")


@dataclass(frozen=True)
class SimulatedArm:
    """One method on one platform, summed over its cycles.

    Attributes:
        settings: in short, as in the tables.
        full_blocks, full_draft_s: blocks of `DRAFT_TOKENS`, and seconds that drafting them took.
    """

    settings: str | None
    cycles: int
    tokens: int
    draft_s: float
    verify_s: float
    full_blocks: int
    full_draft_s: float
    counters: StoreCounters

    @property
    def seconds(self) -> float:
        """All cycles."""
        return self.draft_s + self.verify_s

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def alpha(self) -> float:
        """Tokens a cycle."""
        return self.tokens / self.cycles


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
    resident = folder / RESIDENT
    if not (resident / ROUTING).exists():
        return []
    recording = read_recording(resident)
    labels = [label for label in (*TOP_R.values(), FIXED) if label in fixed_methods(recording)]
    if FIXED not in labels:
        return []
    runs = []
    for name in PLATFORMS:
        simulated = load_simulated(name, recording.info.geometry, 0)
        blocks = {label: recorded_blocks(recording, label, simulated.moe_layers) for label in labels}
        drafted = blocks[FIXED]
        fixed = Setting(max_draft=min(DRAFT_TOKENS, drafted.longest))
        arms = {AR: _arm(simulated, drafted.ar(), None)}
        for label in labels:
            arms[label] = _arm(simulated, blocks[label].cycles(fixed), f"K={fixed.max_draft}")
        for label in (TRUNCATED, FULL):
            measured = _setting(platforms, label, drafted)
            if measured is not None:
                setting, words = measured
                arms[label] = _arm(simulated, drafted.cycles(setting, simulated.machine.capacity), words)
        runs.append(SimulatedRun(name, simulated.model, arms))
    return runs


def _setting(platforms: Sequence[Measured], label: str, blocks: Blocks) -> tuple[Setting, str] | None:
    """A method's settings as it was measured, its K at most as long as what was recorded, and in words."""
    for platform in platforms:
        for method in platform.settings.get("methods", []):
            if method["name"] == label:
                names = ("policy", "tau", "budget", "prefetch", "prefetch_top", "prefetch_inline")
                longest = min(method["max_draft"], blocks.longest)
                words = settings_text(platform, label) or ""
                setting = Setting(max_draft=longest, **{name: method[name] for name in names})
                return setting, words.replace(f"K={method['max_draft']}", f"K={longest}")
    return None


def _arm(simulated: Simulated, cycles: Sequence[Cycle], settings: str | None) -> SimulatedArm:
    machine = open_machine(simulated.machine, cache_policy(simulated.cache, cycles), cycles)
    with no_collection():
        times = machine.run_timed(cycles)
    machine.close()
    drafted = [sum(isinstance(one, Step) and one.phase == "draft" for one in cycle.events) for cycle in cycles]
    full = [time.draft_s for time, count in zip(times, drafted, strict=True) if count == DRAFT_TOKENS]
    return SimulatedArm(
        settings=settings,
        cycles=len(cycles),
        tokens=sum(cycle.emitted for cycle in cycles),
        draft_s=sum(time.draft_s for time in times),
        verify_s=sum(time.verify_s for time in times),
        full_blocks=len(full),
        full_draft_s=sum(full),
        counters=machine.counters,
    )
