"""A line of the audit: what numbers imply by a formula, beside what is reported. Pure.

Printed figures are rounded. An input that carries the unit of its last digit lies anywhere within half of it, so a
formula implies a range; a reported figure that overlaps the range is equal to what is implied, within rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import floor, log10
from typing import Any, Literal

from moexp.audit.notation import value_of
from moexp.papers import Paper
from moexp.tables.core.tags import PAPER

Relation = Literal["=", "<=", ">="]

LAST_DIGIT = {
    "acceptance": 0.001, "agreement": 0.001, "alpha": 0.01, "cost": 0.01, "draft_s": 0.001, "draft_speedup": 0.1,
    "experts_per_layer": 0.1, "predictor_s": 0.001, "prefetch_hit": 0.01, "prefetch_waste": 0.01, "read_gb": 0.1,
    "rho": 0.01, "speedup": 0.01, "step_s": 0.001, "tokens_per_s": 0.01, "unique_draft": 1.0, "verify_cost": 0.01,
    "verify_s": 0.001,
}  # fmt: skip
"""Unit of the last digit that the papers print, by column."""

SLACK = 1e-9  # of floating point


@dataclass(frozen=True)
class Input:
    """A number, where it is from, and the unit of its last printed digit (0: exact)."""

    name: str
    value: float
    source: str
    step: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}={self.value:.6g} ({self.source})"


@dataclass(frozen=True)
class Line:
    """One calculation.

    Attributes:
        id: its name, unique in an audit.
        paper: whose formula or table it is about.
        what: what is calculated, in words.
        formula: as text, over the names of the inputs.
        inputs: what went in.
        implied, low, high: the formula's value, and its range over the inputs' rounding; None: not calculated.
        reported: what the formula's value is compared with; None: nothing is printed.
        relation: how `reported` stands to `implied` where the formula holds.
        unit: of both.
        note: assumptions, or why it has no value.
        subject: which row, where a line stands for several.
        agree, rows: how many of the rows that it stands for are as `relation` says; `rows` is 1 for a single one.
        tag: of the figures.
        tolerance: relative, on top of rounding; None: the line is for comparison only, and never inconsistent.
    """

    id: str
    paper: str
    what: str
    formula: str
    inputs: tuple[Input, ...]
    implied: float | None
    low: float | None = None
    high: float | None = None
    reported: Input | None = None
    relation: Relation = "="
    unit: str = ""
    note: str = ""
    subject: str = ""
    agree: int = 0
    rows: int = 1
    tag: str = PAPER
    tolerance: float | None = None

    @property
    def ratio(self) -> float | None:
        """Reported over implied; None where either is missing or nothing is implied."""
        return self.reported.value / self.implied if self.reported is not None and self.implied else None

    @property
    def gap(self) -> float:
        """How far outside `relation` the reported figure lies, over its size; 0 within rounding and tolerance."""
        if self.reported is None or self.low is None or self.high is None:
            return 0.0
        half, size = self.reported.step / 2, max(abs(self.reported.value), SLACK)
        slack = SLACK + (self.tolerance or 0.0) * max(size, abs(self.low), abs(self.high))
        above = self.reported.value - half - self.high - slack
        below = self.low - self.reported.value - half - slack
        sides = {"=": (above, below), "<=": (above,), ">=": (below,)}[self.relation]
        return max(0.0, *sides) / size

    @property
    def consistent(self) -> bool | None:
        """Whether `relation` holds within the tolerance; None where none is stated."""
        return None if self.tolerance is None else self.gap == 0

    @property
    def finding(self) -> str:
        """One sentence made of the numbers."""
        if self.implied is None:
            return f"Not calculated: {self.note}."
        ends = [self.number(end) for end in (self.low, self.high) if end is not None]
        sentence = f"implied {self.number(self.implied)}{'' if self.unit == 'x' else ' '}{self.unit}".rstrip()
        if len(set(ends)) > 1:
            sentence += f" ({ends[0]} to {ends[1]} over the inputs' rounding)"
        if self.reported is None:
            return f"{_upper(sentence)}; no figure is printed to compare it with."
        sentence += f", {self.reported.source} has {self.number(self.reported.value)}, {self._words()}"
        if self.rows == 1:
            return f"{_upper(sentence)}."
        if self.relation == "=" and abs(self.reported.value - self.implied) < SLACK:
            return f"All {self.rows} are the same."
        return f"{self.agree} of {self.rows} are {self._norm()}; farthest is {self.subject}: {sentence}."

    def number(self, value: float) -> str:
        """A value of this line, to three significant digits or to the reported figure's last."""
        return number(value, self.reported.step if self.reported is not None else 0.0)

    def _norm(self) -> str:
        """What a row that agrees is."""
        word = {"=": "equal", "<=": "at most what is implied", ">=": "at least what is implied"}[self.relation]
        return f"{word} within {'rounding' if self.tolerance is None else f'{self.tolerance:g}'}"

    def _words(self) -> str:
        if self.gap == 0 and self.relation == "=":
            return self._norm()
        times = ""
        if self.ratio is not None:
            times = f"{self.ratio:.4f}" if abs(self.ratio - 1) < 0.005 else number(self.ratio)
            times += " times that"
        if self.relation == "=":
            return times or "which is not that"
        side = "not above it" if self.relation == "<=" else "not below it"
        other = "above it" if self.relation == "<=" else "below it"
        return f"{times}, {side if self.gap == 0 else other}".removeprefix(", ")


def derive(
    paper: str,
    formula: str,
    inputs: Sequence[Input],
    reported: Input | None = None,
    *,
    id: str = "",
    what: str = "",
    given: Mapping[str, str] | None = None,
    **more: Any,
) -> Line:
    """The line of a formula, evaluated as it is written (`moexp.audit.notation`).

    It is monotone in each input, so its range lies at corners of their rounding.

    Args:
        given: what names of the formula stand for, where neither it nor an input says so.
        more: attributes of the line.
    """  # fmt: skip

    def at(values: Sequence[float]) -> float:
        return value_of(formula, [(i.name, value) for i, value in zip(inputs, values, strict=True)], given)

    ends = [(i.value - i.step / 2, i.value + i.step / 2) if i.step else (i.value,) for i in inputs]
    implied = at([i.value for i in inputs])
    values = [implied, *(at(corner) for corner in product(*ends))]
    return Line(id, paper, what, formula, tuple(inputs), implied, min(values), max(values), reported, **more)


def same(paper: str, first: Input, second: Input, **more: Any) -> Line:
    """The line of one figure that stands in two digits."""
    return derive(paper, "the same figure", [first], second, **more)


def farthest(id: str, what: str, lines: Sequence[Line]) -> Line:
    """One line for many: the row farthest from its relation, and how many agree."""
    assert lines, id
    far = max(lines, key=lambda line: (line.gap, _apart(line)))
    return replace(far, id=id, what=what, rows=len(lines), agree=sum(line.gap == 0 for line in lines))


def printed(row: Mapping[str, Any], column: str, source: str, name: str = "") -> Input:
    """A figure that a paper prints as an input, with the rounding of its column."""
    return Input(name or column, float(row[column]), source, LAST_DIGIT.get(column, 0.0))


def cell(paper: Paper, table: int, column: str, name: str = "", **keys: Any) -> Input:
    """The cell of a paper's table in its one row with these values."""
    return printed(only(paper.table(table).rows, **keys), column, f"Table {table}", name)


def only(rows: Iterable[Mapping[str, Any]], **keys: Any) -> Mapping[str, Any]:
    """The one row with these values."""
    (row,) = [row for row in rows if all(row.get(key) == value for key, value in keys.items())]
    return row


def number(value: float, step: float = 0.0) -> str:
    """A value to three significant digits, or to the digit of `step` where that is more; no exponent, no padding."""
    if value == int(value):
        return str(int(value))
    digits = max(0, 2 - floor(log10(abs(value))), round(-log10(step)) if 0 < step < 1 else 0)
    return f"{value:.{digits}f}"


def _apart(line: Line) -> float:
    """Distance in the direction that would break the relation, for choosing among rows that agree."""
    if line.implied is None or line.reported is None:
        return 0.0
    apart = (line.reported.value - line.implied) / max(abs(line.reported.value), abs(line.implied), SLACK)
    return {"=": abs(apart), "<=": apart, ">=": -apart}[line.relation]


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
