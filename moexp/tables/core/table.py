"""Tables as CSV and Markdown. Imports no torch and runs no model.

A table has one CSV with full precision and every interval, and one Markdown file for reading: values with their
interval in one cell, at most 80 columns where the contents allow it.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.metrics import Interval
from moexp.papers import load_paper
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.run import Measured
from moexp.tables.core.tags import PAPER

Cell = str | int | float | bool | None
Row = dict[str, Cell]


@dataclass(frozen=True)
class View:
    """One Markdown table of a `Table`: what a reader compares, already as text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Table:
    """One table of a paper, its own rows beside those measured here.

    Attributes:
        number, title: of the paper's table.
        columns: of the CSV, in order; a row may leave some out.
        rows: the CSV's.
        views: for the Markdown file.
        notes: what a reader must know, one paragraph each.
        sources: `Measured` runs that it is made of, for the provenance line.
    """

    number: int
    title: str
    columns: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[Measured] = field(default_factory=list)

    @property
    def paper_rows(self) -> list[Row]:
        """The paper's own rows."""
        return [row for row in self.rows if row["tag"] == PAPER]


def paper_table(paper: str, number: int, columns: Sequence[str], *notes: str) -> Table:
    """A table of a paper (by its id) without rows."""
    return Table(number, load_paper(paper).table(number).title, columns, notes=list(notes))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file; empty where there is no such file."""
    if not path.exists():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise MoexpError(f"not readable as CSV: {error}", where=str(path)) from error


# --- cells ---


def set_interval(row: Row, name: str, interval: Interval | None) -> None:
    """Sets `name`, `name_lo` and `name_hi` of a row."""
    row[name], row[f"{name}_lo"], row[f"{name}_hi"] = (None, None, None) if interval is None else interval[:3]


def number(value: Cell) -> float:
    """A cell that must hold a number."""
    assert isinstance(value, int | float), value
    return float(value)


def text(value: Cell, digits: int = 2) -> str:
    """A value as a reader wants it; a missing one is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def text_of(row: Row, name: str, digits: int = 2) -> str:
    """`value (lo..hi)` of a row's column, in one cell."""
    lo, hi = row.get(f"{name}_lo"), row.get(f"{name}_hi")
    value = text(row.get(name), digits)
    return value if lo is None or hi is None else f"{value} ({text(lo, digits)}..{text(hi, digits)})"


def shown(column: str, digits: int = 2, *, ends: bool = False, factor: float | None = None) -> Callable[[Row], str]:
    """How a view shows a column: with how many digits, beside its interval or alone, and times what factor."""

    def cell(row: Row) -> str:
        value = row.get(column)
        if factor is not None and value is not None:
            value = factor * number(value)
        return text_of(row, column, digits) if ends else text(value, digits)

    return cell


Columns = Mapping[str, str | Callable[[Row], str]]
"""Of a view: heading -> column, or what makes a cell of a row."""


def view_of(title: str, rows: Iterable[Row], columns: Columns) -> View:
    """A view of rows."""
    cells = [shown(column) if isinstance(column, str) else column for column in columns.values()]
    return View(title, list(columns), [[cell(row) for cell in cells] for row in rows])


def grouped(rows: Iterable[Row], column: str) -> dict[str, list[Row]]:
    """Rows by the value of a column, in the order of their first rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[column]), []).append(row)
    return groups


# --- writing ---


def to_csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """CSV text; a missing value is an empty cell, a float has six significant digits.

    Raises:
        AssertionError: a row has a column that the table has not.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        assert row.keys() <= set(columns), sorted(row.keys() - set(columns))
        writer.writerow([_csv_cell(row.get(column)) for column in columns])
    return out.getvalue()


def _csv_cell(value: Cell) -> str:
    if value is None:
        return ""
    return format(value, ".6g") if isinstance(value, float) else str(value)


def to_markdown(table: Table) -> str:
    """The Markdown file of a table: its views, notes, and where the numbers come from."""
    parts = [f"# Table {table.number}: {table.title}", *map(view_text, table.views)]
    if table.notes:
        parts.append("\n".join(wrapped(note, "- ", "  ") for note in table.notes))
    if table.sources:
        parts.append("\n".join(map(wrapped, provenance_lines(table.sources))))
    return "\n\n".join(parts) + "\n"


def write_table(folder: Path, table: Table) -> list[Path]:
    """Writes `table_<n>.csv` and `table_<n>.md`; returns the two paths."""
    files = [folder / f"table_{table.number}.csv", folder / f"table_{table.number}.md"]
    for path, content in zip(files, (to_csv(table.columns, table.rows), to_markdown(table)), strict=True):
        atomic.write_text(path, content)
    return files


def view_text(view: View) -> str:
    """A Markdown table with its columns aligned in the source, numbers to the right."""
    escaped = [[str(cell).replace("|", "\\|").replace("<", "\\<") for cell in row] for row in (view.header, *view.rows)]
    columns, rule = [], "|"
    for head, *cells in zip(*escaped, strict=True):
        width = max(3, *map(len, (head, *cells)))
        numeric = bool(cells) and all(re.match(r"^([-+]?\d|-$)", cell) for cell in cells)
        columns.append([cell.rjust(width) if numeric else cell.ljust(width) for cell in (head, *cells)])
        rule += "-" * (width + 1) + (":|" if numeric else "-|")
    head, *lines = ["| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True)]
    title = [f"**{view.title}**", ""] if view.title else []
    return "\n".join([*title, head, rule, *lines])


def wrapped(paragraph: str, first: str = "", rest: str = "") -> str:
    """A paragraph in lines of 80 columns; words and hyphenated ones stay whole."""
    return textwrap.fill(
        paragraph, 80, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
