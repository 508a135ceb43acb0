"""What a bench run folder holds, read for DraftExpert's tables, and what their rows have in common. Imports no torch.

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
from moexp.papers import Paper
from moexp.tables.core.rows import Bootstrapped
from moexp.tables.core.run import Measured, load_measured, read_json
from moexp.tables.core.table import Row, Table, View, text
from moexp.tables.core.tags import PAPER
from moexp.tables.draftexpert.labels import ABLATION, DRAFT_METRICS, METHODS, RESIDENT, SHORT, TARGET
from moexp.tables.draftexpert.simulated import SimulatedRun, simulate_run


@dataclass
class Run(Bootstrapped):
    """A bench run folder, read.

    Attributes:
        target: name and geometry of what was decoded.
        platforms: what was measured with time, in the recipe's order.
        resident: what was counted with every expert in memory.
        ablation: table 5's decoding; its settings hold what the rows reached on held-out text.
        draft: the trained draft experts' metrics on held-out text.
        samples: of the bootstrap.
        folder: where all of it lies.
    """

    target: dict[str, Any]
    platforms: list[Measured] = field(default_factory=list)
    resident: Measured | None = None
    ablation: Measured | None = None
    draft: dict[str, Any] = field(default_factory=dict)
    samples: int = 2000
    folder: Path | None = None

    @cached_property
    def simulated(self) -> list[SimulatedRun]:
        """The paper's platforms, simulated from what the folder's resident run recorded."""
        return [] if self.folder is None else simulate_run(self.folder, self.platforms)


def load_run(folder: Path, samples: int = 2000) -> Run:
    """Reads a run folder; what is not measured yet is left out."""
    target = read_json(folder / TARGET) or {}
    names = target.get("platforms", [])
    found = [load_measured(folder / name) for name in names]
    return Run(
        target=target,
        platforms=[platform for platform in found if platform is not None],
        resident=load_measured(folder / RESIDENT),
        ablation=load_measured(folder / ABLATION),
        draft=(read_json(folder / DRAFT_METRICS) or {}).get("metrics", {}),
        samples=samples,
        folder=folder,
    )


# --- what rows share ---


def present(platform: Measured) -> list[str]:
    """Methods that were run, in the tables' order."""
    return sorted(platform.arms, key=lambda name: (METHODS.index(name) if name in METHODS else len(METHODS), name))


def add_paper(table: Table, paper: Paper, **more: str) -> None:
    for row in paper.table(table.number).rows:
        table.rows.append({**more, **row, "tag": PAPER})


def paper_view(table: Table, header: list[str], keys: list[str]) -> View:
    """The paper's rows as they are."""
    rows = [row for row in table.rows if row["tag"] == PAPER]
    return View("Paper", header, [[text(row.get(key), _digits(key)) for key in keys] for row in rows])


def paper_by_platform(table: Table, keys: list[str], shared: list[str], column: str, header: list[str]) -> View:
    """The paper's rows as the paper prints them: one a drafter or policy, `column`, a cost, once for each platform."""
    rows = [row for row in table.rows if row["tag"] == PAPER]
    platforms = list(dict.fromkeys(str(row["platform"]) for row in rows))
    merged: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        merged.setdefault(tuple(str(row[key]) for key in keys), {})[str(row["platform"])] = row
    lines = []
    for names, by_platform in merged.items():
        first = next(iter(by_platform.values()))
        counts = [text(first.get(name), _digits(name)) for name in shared]
        lines.append(
            [*(SHORT.get(name, name) for name in names), *counts]
            + [text(by_platform.get(platform, {}).get(column)) for platform in platforms]
        )
    return View("Paper", [*header, *(f"cost {platform}" for platform in platforms)], lines)


def _digits(column: str) -> int:
    return 3 if column in ("acceptance", "agreement") else 2


def say_missing(table: Table, sources: list[Measured]) -> None:
    if not sources:
        table.notes.append(f"Not measured yet: run `moexp bench --table {table.number}`.")


def acceptance_ctx(run: Run, measured: Mapping[str, Any] | None) -> Interval | None:
    if not measured:
        return None
    rows = [Ratio(value, 1) for value in measured.get("per_row", ())]
    if not rows:
        return Interval(measured.get("acceptance"), None, None, 0)
    return metrics.bootstrap(rows, samples=run.samples)
