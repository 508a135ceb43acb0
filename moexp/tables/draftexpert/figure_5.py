"""DraftExpert's figure 5: experts that a block of consecutive tokens touches, from a routing trace."""

from __future__ import annotations

from pathlib import Path

from moexp.tables.core.plot import Figure, Plot, legend_beside
from moexp.tables.core.provenance import trace_source
from moexp.tables.core.routing_trace import GROWTH_COLUMNS, draw_growth, growth_rows
from moexp.tables.core.table import Row
from moexp.tables.draftexpert.data import Run


def figure_5(run: Run, trace: Path | None) -> Plot | None:
    """Union growth by block length.

    Paper: DraftExpert Figure 5.
    """
    rows = growth_rows(trace)
    if trace is None or not rows:
        return None
    title = "Experts that verifying a block of consecutive tokens touches"
    return Plot("5", title, [*GROWTH_COLUMNS, "tag"], rows, _draw, 3.6, [trace_source(trace)])


def _draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    draw_growth(axes, rows)
    axes.set_xlabel("block length, tokens")
    legend_beside(axes)
