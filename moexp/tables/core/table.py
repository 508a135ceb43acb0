"""From raw records to files: tables as CSV and Markdown. Imports no torch and runs no model.

A table has one CSV with full precision and every interval, and one Markdown file for reading: values with their
interval in one cell, at most 80 columns where the contents allow it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.metrics import Interval
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.run import Measured

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
    """One table of a paper, ours beside theirs.

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


# --- reading a run ---


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


def to_markdown(table: Table) -> str:
    """The Markdown file of a table: its views, notes, and where the numbers come from."""
    parts = [f"# Table {table.number}: {table.title}", *map(view_text, table.views)]
    if table.notes:
        parts.append("\n".join(wrapped(note, "- ", "  ") for note in table.notes))
    if table.sources:
        parts.append("\n".join(wrapped(line) for line in provenance_lines(table.sources)))
    return "\n\n".join(parts) + "\n"


def write_table(folder: Path, table: Table) -> list[Path]:
    """Writes `table_<n>.csv` and `table_<n>.md`; returns the two paths."""
    files = [folder / f"table_{table.number}.csv", folder / f"table_{table.number}.md"]
    for path, content in zip(files, (to_csv(table.columns, table.rows), to_markdown(table)), strict=True):
        atomic.write_text(path, content)
    return files


def _csv_cell(value: Cell) -> str:
    if value is None:
        return ""
    return format(value, ".6g") if isinstance(value, float) else str(value)


def view_text(view: View) -> str:
    """A Markdown table with its columns aligned in the source, numbers to the right."""
    rows = [[str(cell).replace("|", "\\|").replace("<", "\\<") for cell in row] for row in (view.header, *view.rows)]
    widths = [max(3, *(len(row[n]) for row in rows)) for n in range(len(view.header))]
    numeric = [
        bool(view.rows) and all(re.match(r"^([-+]?\d|-$)", row[n]) for row in view.rows) for n in range(len(widths))
    ]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = (
        "|" + "|".join("-" * (w + 1) + (":" if right else "-") for w, right in zip(widths, numeric, strict=True)) + "|"
    )
    title = [f"**{view.title}**", ""] if view.title else []
    return "\n".join([*title, line(rows[0]), rule, *map(line, rows[1:])])


def wrapped(paragraph: str, first: str = "", rest: str = "", width: int = 80) -> str:
    """A paragraph in lines of `width`; words and hyphenated ones stay whole."""
    import textwrap

    return textwrap.fill(
        paragraph, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
