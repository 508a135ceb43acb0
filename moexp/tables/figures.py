"""Which figures there are of each paper, drawn from records and traces that are on disk. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.config.recipe import Recipe
from moexp.tables.core.plot import write_plot
from moexp.tables.draftexpert.figures import draftexpert_plots
from moexp.tables.ecospec.figures import ecospec_plots

FIGURES: dict[str, dict[str, tuple[int, ...]]] = {
    "draftexpert": {"1": (2,), "2": (3,), "3": (3,), "4": (3,), "5": (), "speedup": (2,), "acceptance": (2,)},
    "ecospec": {"1": (2,), "4": (), "gamma": (11,)},
}
"""Paper -> figure -> tables whose runs it is drawn from; none: the routing trace alone."""


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
    make = {"draftexpert": draftexpert_plots, "ecospec": ecospec_plots}[paper]
    plots = make(run_folder, trace_folder, recipe.bench.bootstrap_samples, None if only is None else [only])
    if only is not None and not plots:
        traced = not FIGURES[paper][only]
        raise MoexpError(
            f"figure {only} has nothing to be drawn from",
            where=str(trace_folder if traced else run_folder),
            valid=f"run: moexp trace-routing --recipe {recipe.name}" if traced else "",
        )
    return [path for plot in plots for path in write_plot(results / recipe.name / paper, plot)]


def check_figure(figure: str, paper: str, where: str = "--figure") -> None:
    """MoexpError, naming the place `where` it was asked for, unless the paper has this figure here."""
    if figure not in FIGURES[paper]:
        raise MoexpError(f"no figure {figure!r} to draw", where=where, valid=", ".join(FIGURES[paper]))
