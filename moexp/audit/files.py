"""Our results as the audit reads them: CSV files of `results/<recipe>`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from moexp.audit.lines import Input
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
    for number, row in enumerate(rows[1:], 2):
        where = f"{path}, row {number}"
        if len(row) != len(rows[0]):
            raise MoexpError(f"{len(row)} cells under {len(rows[0])} columns", where=where)
        records.append(
            Record(where, f"{Path(file).parent.name or 'results'}/{path.stem}", dict(zip(rows[0], row, strict=True)))
        )
    return [record for record in records if record.text("tag") != PAPER]
