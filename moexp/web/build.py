"""`moexp report`: tables and figures from raw records, then the two reports over them. Imports no torch.

A report is read once from a recipe's results folder and its run folders, and written as Markdown and as HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.config.locations import run_folder
from moexp.config.recipe import Recipe
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.run import read_json
from moexp.tables.core.table import View
from moexp.tables.write import rebuild
from moexp.web.contents import Section, list_files, read_sections
from moexp.web.facts import facts
from moexp.web.headline import gate_line, headline
from moexp.web.pages import render_reports
from moexp.web.requests import explorer_data
from moexp.web.sources import MARKS, find_runs, load_sources


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


@dataclass(frozen=True)
class Report:
    """Everything that both reports say; texts are Markdown.

    Attributes:
        facts: what was run, name and value.
        headline: a view a paper; gate: what the exactness gate found, if it was run.
        files: of the results folder, relative to it.
        provenance: a line a group of runs.
        explorer: every request and its cycles, for the page's own script.
    """

    name: str
    facts: list[tuple[str, str]]
    headline: list[View]
    gate: str | None
    sections: list[Section]
    files: list[str]
    provenance: list[str]
    explorer: dict[str, Any]


def make_report(recipe: Recipe, runs: dict[str, Path], folder: Path) -> Report:
    """Reads the results folder and the run folders."""
    sources = [source for paper, run in runs.items() for source in load_sources(paper, run)]
    target: dict[str, Any] = {}
    for paper, run in runs.items():
        target = {**(read_json(run / MARKS[paper]) or {}), **target}
    return Report(
        name=recipe.name,
        facts=facts(recipe, sources, target),
        headline=headline(folder),
        gate=gate_line(folder),
        sections=read_sections(folder),
        files=list_files(folder),
        provenance=provenance_lines([source.named() for source in sources]),
        explorer=explorer_data(sources),
    )
