"""Which figures there are of each paper, drawn from records and traces that are on disk. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from moexp.bench.draftexpert_figures import draftexpert_plots
from moexp.bench.ecospec_figures import ecospec_plots
from moexp.bench.plot import write_plot
from moexp.recipe import Recipe


def draw_figures(recipe: Recipe, paper: str, run_folder: Path, trace_folder: Path | None, results: Path) -> list[Path]:
    """Draws what the data allow to `results/<recipe>/<paper>`; a figure whose data are missing is left out.

    Args:
        run_folder: raw records of the paper's runs.
        trace_folder: of the recipe's routing trace; it need not be there.

    Returns:
        the PNG and the CSV of each figure.
    """
    make = {"draftexpert": draftexpert_plots, "ecospec": ecospec_plots}[paper]
    plots = make(run_folder, trace_folder, recipe.bench.bootstrap_samples)
    return [path for plot in plots for path in write_plot(results / recipe.name / paper, plot)]
