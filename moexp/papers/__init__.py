"""What each paper reports: every number of its tables as flat rows, to stand beside what is measured here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from moexp.base.errors import MoexpError
from moexp.base.yamlio import read_yaml

PAPERS = ("draftexpert", "ecospec")


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper; rows are flat and share column names with `moexp.metrics`."""

    number: int
    title: str
    rows: list[dict[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper's identity, tables and figures; `facts` are reported numbers outside of both."""

    id: str
    title: str
    arxiv: str
    tables: dict[int, PaperTable]
    figures: dict[int, dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)

    def table(self, number: int) -> PaperTable:
        """Table `number`; MoexpError naming the tables there are."""
        if number not in self.tables:
            raise MoexpError(f"{self.id} has no table {number}", valid=", ".join(str(n) for n in self.tables))
        return self.tables[number]


@cache
def load_paper(name: str) -> Paper:
    """The numbers of a paper by its id, read once and not to be changed; MoexpError naming the papers there are."""
    if name not in PAPERS:
        raise MoexpError(f"no paper {name!r}", valid=", ".join(PAPERS))
    with as_file(files(__name__) / f"{name}.yaml") as path:
        facts = read_yaml(path)
    tables = {
        number: PaperTable(number, table["title"], table["rows"], table.get("note", ""))
        for number, table in facts.pop("tables").items()
    }
    return Paper(
        id=facts.pop("id"),
        title=facts.pop("title"),
        arxiv=facts.pop("arxiv"),
        tables=tables,
        figures=facts.pop("figures"),
        facts=facts,
    )
