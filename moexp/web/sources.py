"""Which raw records a report shows: every platform and part of a paper's run folder that its tables are made of.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from moexp.config.locations import run_folder
from moexp.config.recipe import Recipe
from moexp.papers import PAPERS, load_paper
from moexp.tables.core.run import Measured
from moexp.tables.draftexpert import data as draftexpert_data
from moexp.tables.ecospec import data as ecospec_data

PAPER_NAMES = {"draftexpert": "DraftExpert", "ecospec": "EcoSpec"}

MARKS = {"draftexpert": draftexpert_data.TARGET, "ecospec": ecospec_data.TARGET}
"""By paper, the file that its measurements leave in a run folder; one folder may hold both papers' records."""


@dataclass(frozen=True)
class Source:
    """One part of a run folder.

    Attributes:
        paper: id of the paper whose tables it fills.
        platform: where the experts were.
        run: which of the platform's runs (temperature, gamma or batch size); empty where there is only one.
    """

    paper: str
    platform: str
    run: str
    measured: Measured

    def named(self) -> Measured:
        """The records under a name that is unique in the report."""
        return replace(self.measured, name=", ".join(filter(None, (self.paper, self.platform, self.run))))


def load_sources(paper: str, folder: Path) -> list[Source]:
    """What a run folder holds of a paper, in the order of its tables; empty where nothing is measured yet.

    Raises:
        MoexpError: steps that do not add up to their requests, or a line that is no record.
    """
    return list(_LOADERS[paper](folder))


def find_runs(recipe: Recipe, paper: str | None = None, out: Path | None = None) -> dict[str, Path]:
    """The run folder of each paper that has been measured.

    Args:
        paper: only this one.
        out: a run folder, if it is not the recipe's own.

    Raises:
        MoexpError: an unknown paper.
    """
    if paper is not None:
        load_paper(paper)
    runs = {}
    for name in PAPERS if paper is None else (paper,):
        folder = run_folder(recipe, out, name)
        if (folder / "recipe.yaml").exists() and (out is None or paper is not None or (folder / MARKS[name]).exists()):
            runs[name] = folder
    return runs


def _draftexpert(folder: Path) -> Iterable[Source]:
    run = draftexpert_data.load_run(folder)
    for measured in (*run.platforms, run.resident, run.ablation):
        if measured is not None:
            yield Source("draftexpert", measured.name, "", measured)


def _ecospec(folder: Path) -> Iterable[Source]:
    for run in ecospec_data.load_eco_runs(folder):
        parts = [(f"T = {temperature:g}", measured) for temperature, measured in run.by_temperature.items()]
        # The main run stands among those with other budgets once more.
        swept = [one for one in sorted(run.by_gamma.items()) if one[1] is not run.greedy]
        parts += [(f"gamma = {gamma}", measured) for gamma, measured in swept]
        parts += [(f"batch = {size}", measured) for size, measured in sorted(run.by_batch.items())]
        for name, measured in parts:
            yield Source("ecospec", run.platform, name, measured)


_LOADERS: dict[str, Callable[[Path], Iterable[Source]]] = {"draftexpert": _draftexpert, "ecospec": _ecospec}
