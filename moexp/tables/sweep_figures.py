"""Figures of a sweep: how fast the best setting is against the link's bandwidth, and against the slots of a cache.

Where does speculation start to pay, and where does it stop? A figure's points are the best of the sweep's settings
there, over AR on the same machine with the same cache. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from moexp.tables.core import plot
from moexp.tables.core.plot import Figure, Look, Plot
from moexp.tables.core.table import Row, grouped, number

LEAST = 3  # values of a grid that make a curve


class Axis(NamedTuple):
    """A grid that figures are drawn against."""

    column: str
    name: str
    label: str
    title: str


AXES = (
    Axis("bandwidth_gb_s", "bandwidth", "bandwidth of the link, GB/s", "Speculation against the bandwidth of the link"),
    Axis("capacity", "cache", "experts that the slots hold", "Speculation against the slots of the cache"),
)

LOOKS = (
    Look(plot.BLUE, "o", "-"),
    Look(plot.ORANGE, "s", "--"),
    Look(plot.GREEN, "^", "-."),
    Look(plot.PURPLE, "D", ":"),
    Look(plot.SKY, "v", (0, (6, 1, 1, 1, 1, 1))),
    Look(plot.GREY, "x", (0, (3, 1))),
)

SETTING = ["max_draft", "policy", "tau", "budget", "prefetch", "prefetch_top"]
MACHINE = ["platform", "model", "cache", "capacity", "bandwidth_gb_s"]
RESULT = ["tokens_per_s", "speedup", "alpha", "hit", "prefetch_waste", "bytes_per_token"]
COLUMNS = ["series", *MACHINE, *SETTING, "ar_tokens_per_s", *RESULT, "pays_from", "pays_to", "tag"]


def draw_sweep(table: Path, sources: Sequence[str] = ()) -> list[Path]:
    """Draws a finished sweep beside its Parquet file, a figure a grid that is long enough.

    Args:
        sources: lines that say where the routing comes from.

    Returns:
        the PNG, the SVG and the CSV of each figure.
    """
    rows = pq.read_table(table).to_pylist()
    axes = [axis for axis in AXES if len({row[axis.column] for row in rows} - {None}) >= LEAST]
    files = []
    for axis in axes:
        name = f"sweep_{table.stem}" if len(axes) == 1 else f"sweep_{table.stem}_{axis.name}"
        files += plot.write_plot(table.parent, _plot(rows, axis, name, sources))
    return files


def _plot(rows: Sequence[Row], axis: Axis, name: str, sources: Sequence[str]) -> Plot:
    """The best of the rows' settings along an axis, by series."""
    best = best_rows(rows, axis.column)
    title = f"{axis.title} ({best[0]['model']} on {best[0]['platform']}, simulated)"
    count = len({tuple(row[name] for name in SETTING) for row in rows if row["method"] != "ar"})
    drafters = ", ".join(sorted({str(row["drafter"]) for row in rows if row["drafter"]}))
    settings = f"Each point is the best of {count} settings there, over AR on the same machine."
    routing = f"Routing: {rows[0]['source']}, drafter {drafters}; nothing here was measured."
    return Plot(name, title, COLUMNS, best, partial(_draw, axis=axis), 3.6, [settings, routing, *sources])


def best_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """For each series and value of `column` the fastest setting, and from where to where the series is above AR.

    A series is a cache or, with one cache, a way to truncate and prefetch.
    """
    ar = {_machine(row): row["tokens_per_s"] for row in rows if row["method"] == "ar"}
    by_cache = len({row["cache"] for row in rows}) > 1
    best: dict[str, dict[float, Row]] = {}
    for row in rows:
        if row["method"] != "ar" and row[column] is not None and row["tokens_per_s"] is not None:
            series = best.setdefault(str(row["cache"]) if by_cache else _way(row), {})
            fastest = series.setdefault(number(row[column]), row)
            if number(row["tokens_per_s"]) > number(fastest["tokens_per_s"]):
                series[number(row[column])] = row
    result: list[Row] = []
    for name, series in best.items():
        points = sorted(series.items())
        pays_from, pays_to = paying([(x, number(row["speedup"])) for x, row in points])
        for _, row in points:
            cells = {column: row[column] for column in (*MACHINE, *SETTING, *RESULT, "tag")}
            pays = {"pays_from": pays_from, "pays_to": pays_to}
            result.append({"series": name, **cells, "ar_tokens_per_s": ar[_machine(row)], **pays})
    return result


def paying(points: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Where a speedup crosses 1, upwards for the first time and downwards for the last: None where it does not within
    the points. Between two points it counts as straight over the logarithm of x.

    Args:
        points: (x, speedup), by x.
    """
    crossings = [
        (above > 1, math.exp(math.log(left) + (1 - below) / (above - below) * math.log(right / left)))
        for (left, below), (right, above) in zip(points, points[1:], strict=False)
        if (below > 1) != (above > 1)
    ]
    up = [x for rises, x in crossings if rises]
    down = [x for rises, x in crossings if not rises]
    return (up[0] if up else None), (down[-1] if down else None)


def _way(row: Row) -> str:
    policy = "fixed K" if row["policy"] == "fixed" else "truncated"
    return f"{policy}, prefetch" if row["prefetch"] == "yes" else policy


def _machine(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in MACHINE)


def _draw(figure: Figure, rows: list[Row], axis: Axis) -> None:
    left, right = figure.subplots(1, 2)
    for (series, points), look in zip(grouped(rows, "series").items(), LOOKS, strict=False):
        xs = [number(row[axis.column]) for row in points]
        plot.draw_series(left, xs, points, "speedup", look, series)
        plot.draw_series(right, xs, points, "tokens_per_s", look, series)
    for of_cache in grouped(rows, "cache").values():  # AR of each cache, once
        ar = sorted({(number(row[axis.column]), number(row["ar_tokens_per_s"])) for row in of_cache})
        right.plot(*zip(*ar, strict=True), color=plot.BLACK, linewidth=0.7, alpha=0.7)
    left.axhline(1.0, color=plot.BLACK, linewidth=1.0)
    low, high = left.get_ylim()
    left.axhspan(min(low, 0.9), 1.0, color=plot.LIGHT, alpha=0.5, linewidth=0)
    left.set_ylim(min(low, 0.9), high)
    left.set_title("(a) speedup over AR (grey: AR is faster)")
    right.set_title("(b) tokens/s (thin: AR)")
    right.set_yscale("log")
    plot.plain_log(right.yaxis)
    for axes in (left, right):
        if axis.column == "bandwidth_gb_s":
            axes.set_xscale("log")
            plot.plain_log(axes.xaxis)
        axes.set_xlabel(axis.label)
        axes.grid()
    plot.legend_beside(right)
