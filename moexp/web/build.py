"""`moexp report`: tables and figures from raw records, then the two reports over them. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.config.locations import run_folder
from moexp.config.recipe import Recipe
from moexp.tables.write import rebuild
from moexp.web.pages import render_reports
from moexp.web.report import make_report
from moexp.web.sources import find_runs


def rebuild_report(
    recipe: Recipe, paper: str | None = None, *, out: Path | None = None, results: Path = Path("results")
) -> list[Path]:
    """Rebuilds the tables and figures of all papers with records (or of `paper` alone), and writes the reports.

    Args:
        out: the run folder, if it is not the recipe's own.
        results: everything goes to `results/<recipe>`.

    Raises:
        MoexpError: an unknown paper, nothing has been measured yet, or records that do not add up.
    """
    runs = find_runs(recipe, paper, out)
    if paper is None and not runs:
        folder = run_folder(recipe) if out is None else out
        raise MoexpError("nothing is measured", where=str(folder), valid=f"run: moexp bench --recipe {recipe.name}")
    papers = list(runs) if paper is None else [paper]
    files = [file for name in papers for file in rebuild(recipe, name, out=out, results=results)]
    return files + write_reports(recipe, {**find_runs(recipe), **runs}, results)


def write_reports(recipe: Recipe, runs: dict[str, Path], results: Path) -> list[Path]:
    """Writes `REPORT.md` and `report.html` to `results/<recipe>`, over what lies there; returns the two paths.

    Args:
        runs: the run folder of each paper whose requests are to be shown.
    """
    folder = results / recipe.name
    texts = render_reports(make_report(recipe, runs, folder), folder)
    for name, text in texts.items():
        atomic.write_text(folder / name, text)
    return [folder / name for name in texts]
