"""A recipe's tables and figures, written from raw records and traces that are on disk. Nothing is run, no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.config.locations import run_folder, trace_folder
from moexp.config.recipe import Recipe
from moexp.papers import load_paper
from moexp.tables.core.plot import write_plot
from moexp.tables.core.table import write_table
from moexp.tables.draftexpert import index as draftexpert
from moexp.tables.ecospec import index as ecospec

TABLES: dict[str, tuple[int, ...]] = {"draftexpert": tuple(draftexpert.TABLES), "ecospec": tuple(ecospec.TABLES)}
"""Tables that are measured here, by paper."""

FIGURES: dict[str, dict[str, tuple[int, ...]]] = {
    "draftexpert": {name: figure.tables for name, figure in draftexpert.FIGURES.items()},
    "ecospec": {name: figure.tables for name, figure in ecospec.FIGURES.items()},
}
"""Paper -> figure -> tables whose runs it is drawn from; none: the routing trace alone."""

_BUILD_TABLES = {"draftexpert": draftexpert.build_tables, "ecospec": ecospec.build_tables}
_BUILD_PLOTS = {"draftexpert": draftexpert.build_plots, "ecospec": ecospec.build_plots}


def rebuild(
    recipe: Recipe, paper: str = "draftexpert", *, out: Path | None = None, results: Path = Path("results")
) -> list[Path]:
    """`moexp report`: every table and figure that the recipe's raw records allow, without running anything.

    Args:
        recipe: whose `moexp bench` run is to be read.
        paper: whose tables.
        out: the run folder, if it is not the recipe's own.
        results: tables and figures go to `results/<recipe>/<paper>`.

    Raises:
        MoexpError: an unknown paper, or nothing has been measured yet.
    """
    load_paper(paper)
    folder = run_folder(recipe, out, paper)
    if not (folder / "recipe.yaml").exists():
        command = f"moexp bench --recipe {recipe.name}" + ("" if paper == "draftexpert" else f" --paper {paper}")
        raise MoexpError("nothing is measured", where=str(folder), valid=f"run: {command}")
    return write_results(recipe, paper, folder, results)


def write_results(
    recipe: Recipe,
    paper: str,
    folder: Path,
    results: Path,
    numbers: Collection[int] | None = None,
    figure: str | None = None,
) -> list[Path]:
    """Writes the tables `numbers` (all if None) and the figures that there are data for; returns their files.

    With `figure`, writes that figure alone.
    """
    files = []
    if figure is None:
        tables = _BUILD_TABLES[paper](folder, samples=recipe.bench.bootstrap_samples)
        wanted = [table for table in tables if numbers is None or table.number in numbers]
        files = [path for table in wanted for path in write_table(results / recipe.name / paper, table)]
    return files + draw_figures(recipe, paper, folder, trace_folder(recipe), results, figure)


def draw_figures(
    recipe: Recipe, paper: str, run_folder: Path, trace_folder: Path | None, results: Path, only: str | None = None
) -> list[Path]:
    """Draws what the data allow to `results/<recipe>/<paper>`; a figure whose data are missing is left out.

    Args:
        run_folder: raw records of the paper's runs.
        trace_folder: of the recipe's routing trace; it need not be there.
        only: the one figure to draw, in place of all.

    Returns:
        the PNG, the SVG and the CSV of each figure.

    Raises:
        MoexpError: the data of the figure `only` are missing.
    """
    plots = _BUILD_PLOTS[paper](run_folder, trace_folder, recipe.bench.bootstrap_samples, only)
    if only is not None and not plots:
        traced = not FIGURES[paper][only]
        raise MoexpError(
            f"figure {only} has nothing to be drawn from",
            where=str(trace_folder if traced else run_folder),
            valid=f"run: moexp trace-routing --recipe {recipe.name}" if traced else "",
        )
    return [path for plot in plots for path in write_plot(results / recipe.name / paper, plot)]


def check_figure(figure: str, paper: str) -> None:
    """MoexpError unless the paper has this figure here."""
    if figure not in FIGURES[paper]:
        raise MoexpError(f"no figure {figure!r} to draw", where="--figure", valid=", ".join(FIGURES[paper]))
