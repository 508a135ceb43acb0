"""Arithmetic in a string, for constants that follow from others: numbers, names, + - * / ** and min, max.

Names may have dots (`link.latency_us`); the caller says what they stand for.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from moexp.base.errors import MoexpError

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max}
_VALID = "numbers, names, + - * / **, min and max"


def evaluate(formula: str, lookup: Callable[[str], float], *, where: str = "") -> float:
    """The value of a formula.

    Args:
        lookup: name -> value; whatever it raises passes.
        where: for the error's text.

    Raises:
        MoexpError: not a formula, or a division by zero.
    """
    try:
        return _value(_parse(formula, where), lookup, where)
    except (ZeroDivisionError, OverflowError) as error:
        raise MoexpError(f"cannot evaluate {formula!r}: {error}", where=where) from error


def names_in(formula: str, *, where: str = "") -> list[str]:
    """The names that a formula needs, each once, in order."""
    return list(dict.fromkeys(_names(_parse(formula, where))))


@cache
def _parse(formula: str, where: str) -> ast.expr:
    try:
        return ast.parse(formula, mode="eval").body
    except SyntaxError as error:
        raise MoexpError(f"not a formula: {formula!r}", where=where, valid=_VALID) from error


def _value(node: ast.expr, lookup: Callable[[str], float], where: str) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name | ast.Attribute):
        return float(lookup(_dotted(node, where)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left, lookup, where), _value(node.right, lookup, where))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, lookup, where)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS and node.args:
        return _CALLS[node.func.id](*(_value(each, lookup, where) for each in node.args))
    raise MoexpError(f"not part of a formula: {ast.unparse(node)!r}", where=where, valid=_VALID)


def _names(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        yield _dotted(node, "")
        return
    inner: Iterable[ast.AST] = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    for child in inner:
        if isinstance(child, ast.expr):
            yield from _names(child)


def _dotted(node: ast.expr, where: str) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, where)}.{node.attr}"
    raise MoexpError(f"not a name: {ast.unparse(node)!r}", where=where, valid=_VALID)
