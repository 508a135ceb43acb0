"""Our results as the audit reads them: CSV files of `results/<recipe>`, and the lines made of their rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from moexp.audit.lines import Input, Line, derive, farthest
from moexp.base.errors import MoexpError
from moexp.tables.core.tags import PAPER


@dataclass(frozen=True)
class Record:
    """A row of a results file, and where it stands."""

    where: str
    source: str
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """A cell as it is; MoexpError where the file has no such column."""
        if column not in self.cells:
            raise MoexpError(f"no column {column!r}", where=self.where, valid=", ".join(self.cells))
        return self.cells[column]

    def number(self, column: str) -> float | None:
        """A cell as a number, None where it is empty; MoexpError where it is neither."""
        cell = self.text(column)
        if not cell:
            return None
        try:
            value = float(cell)
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise MoexpError(f"{column} is not a number: {cell!r}", where=self.where)
        return value

    def input(self, column: str, name: str = "") -> Input | None:
        """A cell as an input of a line; None where it is empty."""
        value = self.number(column)
        return None if value is None else Input(name or column, value, self.source)


Sheets = dict[str, list[Record]]


@dataclass(frozen=True)
class Check:
    """Lines that need some files of the results folder."""

    name: str
    files: tuple[str, ...]
    lines: Callable[[Sheets], list[Line]]


def run_checks(folder: Path, checks: Sequence[Check]) -> tuple[list[Line], list[str]]:
    """The lines that a results folder allows, and what is left out, each with the reason.

    Raises:
        MoexpError: a file is no CSV, or lacks a column or a number that a line needs.
    """
    sheets: dict[str, list[Record] | None] = {}
    lines: list[Line] = []
    left_out = []
    for check in checks:
        for file in check.files:
            if file not in sheets:
                sheets[file] = read_sheet(folder, file)
        missing = [file for file in check.files if sheets[file] is None]
        if missing:
            left_out.append(f"{check.name}: no {', '.join(missing)} in {folder}")
            continue
        made = check.lines({file: sheet for file in check.files if (sheet := sheets[file]) is not None})
        lines += made
        if not made:
            left_out.append(f"{check.name}: nothing measured in {', '.join(check.files)}")
    return lines, left_out


def read_sheet(folder: Path, file: str) -> list[Record] | None:
    """The rows of ours in a results file, the papers' left out; None where there is no such file."""
    path = folder / file
    if not path.exists():
        return None
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MoexpError(f"not readable as CSV: {error}", where=str(path)) from error
    if not rows or len(set(rows[0])) < len(rows[0]) or "tag" not in rows[0]:
        raise MoexpError("no header of a results table", where=str(path), valid="distinct columns, one of them tag")
    records = []
    for place, row in enumerate(rows[1:], 2):
        where = f"{path}, row {place}"
        if len(row) != len(rows[0]):
            raise MoexpError(f"{len(row)} cells under {len(rows[0])} columns", where=where)
        records.append(
            Record(where, f"{Path(file).parent.name or 'results'}/{path.stem}", dict(zip(rows[0], row, strict=True)))
        )
    return [record for record in records if record.text("tag") != PAPER]


def row_line(
    record: Record,
    columns: Sequence[str],
    formula: str,
    of: Callable[..., float],
    inputs: Iterable[Input | None],
    reported: Input | None,
    tolerance: float | None,
    **more: Any,
) -> Iterator[Line]:
    """The line of one row, called by its cells in `columns`; none where an input or the figure is missing."""
    known = list(inputs)
    values = [value for value in known if value is not None]
    if reported is None or len(values) < len(known):
        return
    subject = ", ".join(cell for column in columns if (cell := record.text(column)))
    yield derive("", "ours", "", formula, of, values, reported, tolerance=tolerance, tag=record.text("tag"),
                 subject=subject, **more)  # fmt: skip


def by_tag(id: str, what: str, lines: Iterable[Line]) -> list[Line]:
    """One line for all rows of a tag; the name of any but the first tag ends in it."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.tag, []).append(line)
    return [
        replace(farthest(id, what, group), id=id if place == 0 else f"{id}.{tag}")
        for place, (tag, group) in enumerate(groups.items())
    ]
