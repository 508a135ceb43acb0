"""Rules that rows of our results follow: a formula, its inputs by column, and a tolerance. Pure.

A rule sees a row's scope: `row` itself, other rows by name, and inputs that are in no column. An input is written
`column`, `other.column` or `name=other.column`; an empty cell makes no line, unless the input ends in `?`.
Of several reported columns each makes a line, and `{}` in the inputs is its name; `{column}` is the row's cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moexp.audit.files import Record, Sheets, read_sheet
from moexp.audit.lines import Input, Line, Relation, derive, farthest

EXACT = 1e-4
"""Cells have six significant digits, so identities hold within this."""

Scope = Mapping[str, Record | Sequence[Record] | Input | None]


@dataclass(frozen=True)
class Rule:
    """One formula over a file's rows.

    Attributes:
        id, what: of its line.
        formula, given, relation, unit, note: as a line's.
        inputs, reported: as above, separated by blanks.
        tolerance: relative; None: for comparison only.
    """

    id: str
    what: str
    formula: str
    inputs: str
    reported: str
    tolerance: float | None = EXACT
    relation: Relation = "="
    unit: str = ""
    note: str = ""
    given: Mapping[str, str] | None = None

    def lines(self, scope: Scope, subject: str) -> Iterator[Line]:
        """The lines of one row, a figure each; none where an input or the figure is missing."""
        row = scope["row"]
        assert isinstance(row, Record)
        for column in self.reported.split():
            inputs: list[Input | None] = []
            for written in self.inputs.format(column, **row.cells).split():
                values = _inputs(scope, written.rstrip("?"))
                if not values and not written.endswith("?"):
                    inputs.append(None)
                inputs += values
            reported = _inputs(scope, column)
            present = [value for value in inputs if value is not None]
            if not reported or not present or len(present) < len(inputs):
                continue
            yield derive(
                "ours", self.formula, present, reported[0], id=self.id.format(**row.cells), given=self.given,
                what=self.what.format(**row.cells), relation=self.relation, unit=self.unit, note=self.note,
                subject=subject, tag=row.text("tag"), tolerance=self.tolerance,
            )  # fmt: skip


def repeats(id: str, what: str, columns: str) -> Rule:
    """The rule of columns that repeat those of the row `first`."""
    return Rule(id, what, "the same figure", "first.{}", columns)


def _inputs(scope: Scope, written: str) -> list[Input]:
    """What an input stands for: one, or one each of several rows; none where a cell is empty."""
    name, _, path = written.rpartition("=")
    owner, _, column = path.rpartition(".")
    given = scope.get(path) if not owner else None
    if isinstance(given, Input):
        return [given]
    if path in scope:
        return []
    records = scope[owner or "row"]
    records = [records] if isinstance(records, Record) else records or []
    assert not isinstance(records, Input), written
    values = [record.input(column, name) for record in records]
    return [] if None in values else [value for value in values if value is not None]


@dataclass(frozen=True)
class Part:
    """Rules of a file's rows.

    Attributes:
        columns: cells that name a row, a blank apart; one that ends in `?` may be no column of the file.
        scopes: of the rows.
    """

    columns: str
    scopes: Callable[[Sheets], Iterable[Scope]]
    rules: tuple[Rule, ...]

    def lines(self, sheets: Sheets) -> Iterator[Line]:
        """The lines of all rows, rule by rule."""
        scopes = list(self.scopes(sheets))
        for rule in self.rules:
            for scope in scopes:
                row = scope["row"]
                assert isinstance(row, Record)
                names = [c.rstrip("?") for c in self.columns.split() if not c.endswith("?") or c[:-1] in row.cells]
                yield from rule.lines(scope, ", ".join(cell for name in names if (cell := row.text(name))))


@dataclass(frozen=True)
class Check:
    """Lines that need some files of the results folder."""

    name: str
    files: tuple[str, ...]
    parts: tuple[Part, ...]

    def lines(self, sheets: Sheets) -> list[Line]:
        """A line a rule and tag for all rows; the id of any but a rule's first tag ends in it."""
        groups: dict[str, dict[str, list[Line]]] = {}
        for part in self.parts:
            for line in part.lines(sheets):
                groups.setdefault(line.id, {}).setdefault(line.tag, []).append(line)
        return [
            replace(farthest(id, lines[0].what, lines), id=id if not n else f"{id}.{tag}")
            for id, by_tag in groups.items()
            for n, (tag, lines) in enumerate(by_tag.items())
        ]


def run_checks(folder: Path, checks: Iterable[Check]) -> tuple[list[Line], list[str]]:
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
        checked = check.lines({file: sheet for file in check.files if (sheet := sheets[file]) is not None})
        lines += checked
        if not checked:
            left_out.append(f"{check.name}: nothing measured in {', '.join(check.files)}")
    return lines, left_out
