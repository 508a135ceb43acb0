"""`moexp report`: tables and figures from raw records, then the two reports over them. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from moexp.base import atomic
from moexp.config.recipe import Recipe
from moexp.web.contents import REPORT_HTML, REPORT_MD
from moexp.web.markdown import report_markdown
from moexp.web.page import report_html
from moexp.web.report import make_report
from moexp.web.sources import find_runs, rebuild_tables


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
    return rebuild_tables(recipe, paper, out=out, results=results) + write_reports(
        recipe, {**find_runs(recipe), **find_runs(recipe, paper, out)}, results
    )


def write_reports(recipe: Recipe, runs: dict[str, Path], results: Path) -> list[Path]:
    """Writes `REPORT.md` and `report.html` to `results/<recipe>`, over what lies there; returns the two paths.

    Args:
        runs: the run folder of each paper whose requests are to be shown.
    """
    folder = results / recipe.name
    report = make_report(recipe, runs, folder)
    texts = {REPORT_MD: report_markdown(report), REPORT_HTML: report_html(report, folder)}
    for name, text in texts.items():
        atomic.write_text(folder / name, text)
    return [folder / name for name in texts]
