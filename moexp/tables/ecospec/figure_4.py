"""EcoSpec's figure 4: how evenly a routing trace uses the experts of each layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from moexp.tables.core.plot import BLACK, BLUE, GREY, Axes, Figure, Plot
from moexp.tables.core.provenance import trace_source
from moexp.tables.core.routing_trace import LOAD, read_trace
from moexp.tables.core.table import Row, grouped, number
from moexp.tables.ecospec.data import EcoRun

SPREAD = ("lowest", "lower_quartile", "median", "upper_quartile", "highest")
MOST = 4.0  # the heatmap's colours end at this many times the mean, and at its inverse
UNUSED = 1e-9  # where an expert that no token chose is drawn on a log scale: beyond its end


def figure_4(runs: Sequence[EcoRun], trace: Path | None) -> Plot | None:
    """(a) tokens of each expert over its layer's mean, (b) how they spread in each layer.

    Paper: EcoSpec Figure 4.
    """
    loads = read_trace(trace, LOAD)
    if trace is None or not loads:
        return None
    layers = grouped(loads, "layer")
    rows: list[Row] = [{"panel": "a", **row} for row in loads]
    for experts in layers.values():
        values = sorted(number(row["load_over_mean"]) for row in experts)
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        spread: Row = dict(zip(SPREAD, [values[0], *quartiles, values[-1]], strict=True))
        rows.append({"panel": "b", "layer": experts[0]["layer"], "tag": experts[0]["tag"], **spread})
    columns = ["panel", "layer", "expert", "tokens", "load_over_mean", *SPREAD, "tag"]
    height = min(9.0, 1.8 + max(1.6, 0.13 * len(layers)))
    return Plot("4", "How evenly experts are used", columns, rows, _draw, height, [trace_source(trace)])


def _draw(figure: Figure, rows: list[Row]) -> None:
    cells, spreads = ([row for row in rows if row["panel"] == panel] for panel in "ab")
    heat, spread = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1))
    _draw_heat(figure, heat, cells)
    for y, row in enumerate(spreads):
        ends = [max(number(row[name]), UNUSED) for name in SPREAD]
        spread.plot([ends[0], ends[4]], [y, y], color=GREY, linewidth=0.8)
        spread.plot([ends[1], ends[3]], [y, y], color=BLUE, linewidth=3.4, solid_capstyle="butt")
        spread.plot(ends[2], y, marker="|", color=BLACK, markersize=5, markeredgewidth=1.4)
    spread.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
    spread.tick_params(axis="y", length=0)
    spread.set_xscale("log", base=2)
    spread.set_xlim(left=1 / 16)
    spread.xaxis.set_major_formatter(lambda value, _: _times(value))
    title = f"(b) range, quartiles, median ({cells[0]['tag']})"
    spread.set(title=title, xlabel="load over the layer's mean (log scale)")
    spread.grid(axis="x")


def _draw_heat(figure: Figure, axes: Axes, cells: list[Row]) -> None:
    from matplotlib.colors import LogNorm

    by_layer = grouped(cells, "layer")
    layers, every = list(by_layer), -(-len(by_layer) // 30)
    grid = [[max(number(row["load_over_mean"]), UNUSED) for row in experts] for experts in by_layer.values()]
    image = axes.imshow(grid, norm=LogNorm(1 / MOST, MOST), cmap="cividis", aspect="auto", interpolation="nearest")
    axes.set(title=f"(a) load of each expert ({cells[0]['tag']})", xlabel="expert", ylabel="layer")
    axes.set_yticks(range(0, len(layers), every), layers[::every], fontsize=7)
    bar = figure.colorbar(image, ax=axes, location="bottom", extend="both", fraction=0.05, pad=0.02, aspect=40)
    marks = [1 / MOST, 1 / 2, 1.0, 2.0, MOST]
    bar.set_ticks(marks, labels=[_times(mark) for mark in marks])
    bar.minorticks_off()
    bar.set_label("load over the layer's mean (log scale)")


def _times(value: float) -> str:
    """4, or 1/4."""
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
