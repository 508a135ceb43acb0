"""A routing trace's tables, and the growth of unions that two of the papers' figures show of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.tables.core.plot import BLACK, BLUE, Axes
from moexp.tables.core.table import Cell, Row, number, read_rows

LOAD, UNION = "expert_load.csv", "union_growth.csv"
"""Tables in a trace's folder, which `moexp.learn.trace.trace` writes."""

GROWTH_COLUMNS = ["block_length", "unique_verify_per_layer", "lowest_layer", "highest_layer", "uniform", "blocks"]


def read_trace(trace: Path | None, name: str) -> list[Row]:
    """Rows of a trace's table; empty where there is none.

    Raises:
        MoexpError: it is not such a table.
    """
    if trace is None:
        return []
    try:
        return [{key: _value(key, cell) for key, cell in row.items()} for row in read_rows(trace / name)]
    except ValueError as error:
        raise MoexpError(f"not a table of a trace: {error}", where=str(trace / name)) from error


def _value(column: str, cell: str) -> Cell:
    if column == "tag":
        return cell
    if not cell:
        return None
    return int(cell) if cell.isdecimal() else float(cell)


def growth_rows(trace: Path | None) -> list[Row]:
    """Union growth by block length, as far as the trace's texts are long enough."""
    return [row for row in read_trace(trace, UNION) if row.get("unique_verify_per_layer") is not None]


def draw_growth(axes: Axes, rows: Sequence[Row]) -> None:
    """Experts a layer against block length: mean, lowest and highest layer, and the uniform bound."""
    lengths, mean, lowest, highest, uniform, _ = ([number(row[name]) for row in rows] for name in GROWTH_COLUMNS)
    tag = rows[0]["tag"]
    axes.plot(lengths, uniform, color=BLACK, linestyle="--", linewidth=1.2, label="uniform routing (formula)")
    axes.plot(lengths, mean, color=BLUE, marker="o", markersize=4, label=f"mean of the layers ({tag})")
    axes.fill_between(lengths, lowest, highest, color=BLUE, alpha=0.18, linewidth=0, label="lowest to highest layer")
    axes.set_xticks(lengths)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("unique experts a layer")
    axes.grid(axis="y")
