"""What a bench run folder holds, read for DraftExpert's tables and figures. Imports no torch.

Intervals are 95% bootstrap intervals over prompts; where two methods are compared, a prompt's two arms are drawn
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moexp import metrics
from moexp.metrics import Interval, Ratio
from moexp.records import StepRecord
from moexp.tables.core.rows import Bootstrapped
from moexp.tables.core.run import ArmRecords, Measured, load_measured, read_json
from moexp.tables.core.table import Row, set_interval
from moexp.tables.draftexpert.labels import ABLATION, DRAFT_METRICS, DRAFT_TOKENS, METHODS, RESIDENT, TARGET
from moexp.tables.draftexpert.simulation import SimulatedRun, simulate_run


@dataclass
class Run(Bootstrapped):
    """A bench run folder, read.

    Attributes:
        target: name and geometry of what was decoded.
        folder: where all of it lies.
        platforms: what was measured with time, in the recipe's order.
        resident: what was counted with every expert in memory.
        ablation: table 5's decoding; its settings hold what the rows reached on held-out text.
        draft: the trained draft experts' metrics on held-out text.
    """

    target: dict[str, Any]
    folder: Path
    platforms: list[Measured] = field(default_factory=list)
    resident: Measured | None = None
    ablation: Measured | None = None
    draft: dict[str, Any] = field(default_factory=dict)

    def head(self, platform: Measured) -> Row:
        """What every row of a platform begins with."""
        return {"target": self.target.get("name"), "platform": platform.name, "tag": platform.tag}

    @cached_property
    def simulated(self) -> list[SimulatedRun]:
        """The paper's platforms, simulated from what the folder's resident run recorded."""
        return simulate_run(self.folder, self.platforms)


def load_run(folder: Path, samples: int = 2000) -> Run:
    """Reads a run folder; what is not measured yet is left out."""
    target = read_json(folder / TARGET) or {}
    platforms = [load_measured(folder / name) for name in target.get("platforms", [])]
    return Run(
        target=target,
        folder=folder,
        platforms=[platform for platform in platforms if platform is not None],
        resident=load_measured(folder / RESIDENT),
        ablation=load_measured(folder / ABLATION),
        draft=(read_json(folder / DRAFT_METRICS) or {}).get("metrics", {}),
        samples=samples,
    )


def present(platform: Measured) -> list[str]:
    """Methods that were run, in the tables' order."""
    return sorted(platform.arms, key=lambda name: (METHODS.index(name) if name in METHODS else len(METHODS), name))


def acceptance_ctx(run: Run, metrics_of_drafter: Mapping[str, Any] | None) -> Interval | None:
    """Acceptance of blocks started from held-out text, with its interval over held-out rows."""
    if not metrics_of_drafter:
        return None
    rows = [Ratio(value, 1) for value in metrics_of_drafter.get("per_row", ())]
    if not rows:
        return Interval(metrics_of_drafter.get("acceptance"), None, None, 0)
    return metrics.bootstrap(rows, samples=run.samples)


def draft_counts(run: Run, drafter: str, method: str) -> Row:
    """Counts of one drafter, from the resident run and from the draft experts' own measurement."""
    row: Row = {"prompts": None, "blocks": None, "repeated_ngrams": None}
    arms = run.resident.arms.get(method, {}) if run.resident is not None else {}
    blocks = {prompt: ArmRecords(arm.request, full_blocks(arm)) for prompt, arm in arms.items()}
    row |= run.cells(blocks, unique_draft=metrics.unique_draft, acceptance=metrics.acceptance)
    set_interval(row, "acceptance_ctx", acceptance_ctx(run, run.draft.get(drafter)))
    if blocks:
        row["prompts"], row["blocks"] = len(blocks), sum(len(arm.steps) for arm in blocks.values())
        row["repeated_ngrams"] = metrics.repeated_ngrams(arm.request.tokens for arm in arms.values()).value
    return row


def draft_cost(arm: ArmRecords) -> Ratio:
    """Seconds of drafting a drafted token, over full blocks."""
    return metrics.pooled(Ratio(step.draft_s, step.drafted) for step in full_blocks(arm))


def full_blocks(arm: ArmRecords) -> list[StepRecord]:
    """Cycles that drafted `DRAFT_TOKENS`; the last blocks of a text are shorter."""
    return [step for step in arm.steps if step.drafted == DRAFT_TOKENS]
