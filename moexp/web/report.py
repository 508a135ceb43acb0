"""Everything that the two reports of a recipe say, read once from its results folder and its run folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moexp.config.recipe import Recipe
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.run import read_json
from moexp.tables.core.table import View
from moexp.web.contents import Section, list_files, read_sections
from moexp.web.facts import facts
from moexp.web.headline import gate_line, headline
from moexp.web.requests import explorer_data
from moexp.web.sources import MARKS, load_sources


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
