"""EcoSpec's figure 4: how evenly a routing trace uses the experts of each layer. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.tables.core.plot import BLACK, BLUE, GREY, LOAD, Plot, number, read_trace, trace_source
from moexp.tables.core.table import Row
from moexp.tables.ecospec.data import EcoRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPREAD = ("lowest", "lower_quartile", "median", "upper_quartile", "highest")
MOST = 4.0  # the heatmap's colours end at this many times the mean, and at its inverse
UNUSED = 1e-9  # where an expert that no token chose stands on a log scale: beyond its end


def expert_load(_: Sequence[EcoRun], __: Path, trace: Path | None) -> Plot | None:
    """Figure 4: (a) tokens of each expert over its layer's mean, (b) how they spread in each layer."""
    loads = read_trace(trace, LOAD)
    if trace is None or not loads:
        return None
    layers = list(dict.fromkeys(row["layer"] for row in loads))
    by_layer = {layer: [row for row in loads if row["layer"] == layer] for layer in layers}
    rows: list[Row] = [{"panel": "a", **row} for row in loads]
    for layer, mine in by_layer.items():
        values = sorted(number(row["load_over_mean"]) for row in mine)
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        spread: Row = dict(zip(SPREAD, [values[0], *quartiles, values[-1]], strict=True))
        rows.append({"panel": "b", "layer": layer, "tag": mine[0]["tag"], **spread})
    columns = ["panel", "layer", "expert", "tokens", "load_over_mean", *SPREAD, "tag"]
    height = min(9.0, 1.8 + max(1.6, 0.13 * len(layers)))
    return Plot("4", "How evenly experts are used", columns, rows, _draw_load, height, [trace_source(trace)])


def _draw_load(figure: Figure, rows: list[Row]) -> None:
    from matplotlib.colors import LogNorm

    cells, spreads = ([row for row in rows if row["panel"] == panel] for panel in "ab")
    layers = [str(row["layer"]) for row in spreads]
    by_layer = {layer: [number(r["load_over_mean"]) for r in cells if str(r["layer"]) == layer] for layer in layers}
    grid = [[max(value, UNUSED) for value in values] for values in by_layer.values()]
    heat, spread = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1))
    tag = cells[0]["tag"]
    image = heat.imshow(grid, norm=LogNorm(1 / MOST, MOST), cmap="cividis", aspect="auto", interpolation="nearest")
    heat.set_title(f"(a) load of each expert ({tag})")
    heat.set_xlabel("expert")
    heat.set_ylabel("layer")
    every = -(-len(layers) // 30)
    heat.set_yticks(range(0, len(layers), every), layers[::every], fontsize=7)
    bar = figure.colorbar(image, ax=heat, location="bottom", extend="both", fraction=0.05, pad=0.02, aspect=40)
    marks = [1 / MOST, 1 / 2, 1.0, 2.0, MOST]
    bar.set_ticks(marks, labels=[_times(mark) for mark in marks])
    bar.minorticks_off()
    bar.set_label("load over the layer's mean (log scale)")

    for place, row in enumerate(spreads):
        ends = [max(number(row[name]), UNUSED) for name in SPREAD]
        spread.plot([ends[0], ends[4]], [place, place], color=GREY, linewidth=0.8)
        spread.plot([ends[1], ends[3]], [place, place], color=BLUE, linewidth=3.4, solid_capstyle="butt")
        spread.plot(ends[2], place, marker="|", color=BLACK, markersize=5, markeredgewidth=1.4)
    spread.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
    spread.tick_params(axis="y", length=0)
    spread.set_xscale("log", base=2)
    spread.set_xlim(left=1 / 16)
    spread.xaxis.set_major_formatter(lambda value, _: _times(value))
    spread.set_title(f"(b) range, quartiles, median ({tag})")
    spread.set_xlabel("load over the layer's mean (log scale)")
    spread.grid(axis="x")


def _times(value: float) -> str:
    """4, or 1/4."""
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
