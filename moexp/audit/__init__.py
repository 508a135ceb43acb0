"""`moexp audit`: what the papers' own numbers imply, against what they report, and ours by the same formulas.

By calculation only: it reads the papers' figures and `results/<recipe>`, and runs no model. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.audit import (
    draftexpert,
    draftexpert_bytes,
    ecospec,
    ecospec_experts,
    ours,
    ours_ecospec,
)
from moexp.audit.lines import Line
from moexp.audit.rules import run_checks
from moexp.audit.text import terminal_tables, write_files
from moexp.papers import Paper, load_paper

if TYPE_CHECKING:
    from rich.console import Console

SOURCES: dict[str, tuple[Callable[[Paper], Iterable[Line]], ...]] = {
    "draftexpert": (
        draftexpert.cycles, draftexpert.truncated, draftexpert.top_r, draftexpert.agreements, draftexpert.draft_costs,
        draftexpert_bytes.unions, draftexpert_bytes.links, draftexpert_bytes.weights, draftexpert.repeated,
    ),
    "ecospec": (
        ecospec.cycles, ecospec.steps, ecospec.batches, ecospec.linear, ecospec.bytes_and_time, ecospec.least_steps,
        ecospec_experts.uniform, ecospec_experts.limits, ecospec_experts.scores, ecospec_experts.expert_sizes,
        ecospec_experts.traffic, ecospec.averages, ecospec.repeats, ecospec.best,
    ),
}  # fmt: skip
"""What makes the lines of each paper."""


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        lines: of both papers, then of ours.
        left_out: checks of ours that the results folder does not allow, with the reason.
        files: written.
    """

    lines: list[Line]
    left_out: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def inconsistent(self) -> list[Line]:
        """Lines of ours whose figures differ by more than their tolerance."""
        return [line for line in self.lines if line.consistent is False]


def paper_lines() -> list[Line]:
    """What both papers' own numbers imply."""
    papers = {name: load_paper(name) for name in SOURCES}
    return [line for name, makes in SOURCES.items() for make in makes for line in make(papers[name])]


def our_lines(folder: Path) -> tuple[list[Line], list[str]]:
    """The same formulas on a results folder, and what is left out; MoexpError where a file is malformed."""
    return run_checks(folder, [*ours.CHECKS, *ours_ecospec.CHECKS])


def run_audit(
    recipe: str, console: Console | None = None, *, out: Path | None = None, results: Path = Path("results")
) -> Audit:
    """Audits both papers and `results/<recipe>`; writes `audit.csv` and `audit.md` and prints the lines.

    Args:
        recipe: its name; a results folder that does not exist leaves its lines out.
        console: to print to, if any.
        out: folder for the two files, if not `results/<recipe>`.
        results: where the recipes' results are.

    Raises:
        MoexpError: a results file is malformed, or the files cannot be written.
    """
    folder = results / recipe
    own, left_out = our_lines(folder)
    audit = Audit([*paper_lines(), *own], left_out)
    audit.files = write_files(out or folder, recipe, audit.lines, left_out)
    if console is not None:
        _print(audit, console)
    return audit


def _print(audit: Audit, console: Console) -> None:
    for table in terminal_tables(audit.lines):
        console.print(table)
        console.print()
    for reason in audit.left_out:
        console.print(f"left out: {reason}", highlight=False)
    for path in audit.files:
        console.print(str(path), highlight=False, soft_wrap=True)
    for line in audit.inconsistent:
        console.print(f"inconsistent: {line.id}: {line.finding}", highlight=False, soft_wrap=True)
