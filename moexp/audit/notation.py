"""Formulas as papers write them, evaluated: `(1 + K a) / (K c / s + v)`. Pure.

Numbers, names and brackets side by side are multiplied, and `^` is a power. A formula may say what it gives (`E = ...`)
and what its names stand for (`... with x = a / b - 1`). `p of p^2 = a` is the p in [0, 1] that solves the equation, or
its solution after a colon where that is written. `sum of the parts` and the like are of all inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from scipy.optimize import brentq

from moexp.base.formula import evaluate

_OF_ALL = re.compile(r"(mean|sum|min|max) (?:of|over) (?:the four|the parts(?: in ms)?|workloads|positions 1 to 4)$")
_SOLVED = re.compile(r"(\w+) of ([^=]+) = ([^:]+)(?:: (.+))?")
_DEFINITION = re.compile(r"(?:,| with) (\w+) = ")


def value_of(formula: str, inputs: Sequence[tuple[str, float]], given: Mapping[str, str] | None = None) -> float:
    """The value of a formula.

    Args:
        inputs: name and value of each.
        given: formulas that names, or the formula itself, stand for, where its text does not say so.

    Raises:
        MoexpError: not a formula.
        KeyError: a name that stands for nothing.
    """
    defined = dict(given or {})
    formula = defined.get(formula, formula)
    if solved := _SOLVED.fullmatch(formula):
        name, left, right, solution = solved.groups()
        if solution:
            return value_of(solution, inputs, defined)
        wanted = value_of(right, inputs, defined)
        return float(brentq(lambda x: value_of(left, [*inputs, (name, x)], defined) - wanted, 0.0, 1.0))
    text, *definitions = _DEFINITION.split(formula)
    defined |= dict(zip(definitions[::2], definitions[1::2], strict=True))
    values = [value for _, value in inputs]
    known = {
        "first": values[0],
        "mean": sum(values) / len(values),
        "sum": sum(values),
        "min": min(values),
        "max": max(values),
    }
    known |= dict(inputs)
    return evaluate(_arithmetic(text), lambda name: known[name] if name in known else value_of(defined[name], inputs))


@cache
def _arithmetic(text: str) -> str:
    """The same with every multiplication and power as Python writes it."""
    text = _OF_ALL.sub(r"\1", text.replace("the same figure", "first"))
    tokens = re.findall(r"[\w.]+|\S", re.sub(r"^\w+ = ", "", text).replace("^", "**"))
    parts = [""]
    for token in tokens:
        before = parts[-1]
        if (token == "(" or _is_operand(token)) and (before == ")" or _is_operand(before)):
            parts.append("" if before in ("min", "max") else "*")
        parts.append(token)
    return "".join(parts)


def _is_operand(token: str) -> bool:
    return re.fullmatch(r"[\w.]+", token) is not None
