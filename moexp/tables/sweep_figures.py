"""Figures of a sweep: how fast the best setting is against the link's bandwidth, and against the slots of a cache.

Where does speculation start to pay, and where does it stop? A figure's points are the best of the sweep's settings
there, over AR on the same machine with the same cache. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.parquet as pq

from moexp.tables.core.plot import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    Look,
    Plot,
    draw_series,
    legend_beside,
    plain_log,
    write_plot,
)
from moexp.tables.core.table import Row, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    Look(BLUE, "o", "-"),
    Look(ORANGE, "s", "--"),
    Look(GREEN, "^", "-."),
    Look(PURPLE, "D", ":"),
    Look(SKY, "v", (0, (6, 1, 1, 1, 1, 1))),
    Look(GREY, "x", (0, (3, 1))),
)

SETTING = ["max_draft", "policy", "tau", "budget", "prefetch", "prefetch_top"]
MACHINE = ["platform", "model", "cache", "capacity", "bandwidth_gb_s"]
FOUND = ["ar_tokens_per_s", "tokens_per_s", "speedup", "alpha", "hit", "prefetch_waste", "bytes_per_token"]
COLUMNS = ["series", *MACHINE, *SETTING, *FOUND, "pays_from", "pays_to", "tag"]


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
        files += write_plot(table.parent, plot_of(rows, axis, name, sources))
    return files


def plot_of(rows: Sequence[Row], axis: Axis, name: str, sources: Sequence[str] = ()) -> Plot:
    """The best of the rows' settings along an axis, a series for each cache or, with one cache, each way to truncate
    and prefetch.
    """
    shown = best_rows(rows, axis.column)
    first = shown[0]
    title = f"{axis.title} ({first['model']} on {first['platform']}, simulated)"
    settings = f"Each point is the best of {_settings(rows)} settings there, over AR on the same machine."
    routing = f"Routing: {rows[0]['source']}, drafter {_drafter(rows)}; nothing here was measured."

    def draw(figure: Figure, rows: list[Row]) -> None:
        _draw(figure, rows, axis)

    return Plot(name, title, COLUMNS, shown, draw, 3.6, [settings, routing, *sources])


def best_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """For each series and value of `column` the fastest setting, and from where to where the series is above AR."""
    plain = {_machine(row): row for row in rows if row["method"] == "ar"}
    by_cache = len({row["cache"] for row in rows}) > 1
    best: dict[tuple[str, float], Row] = {}
    for row in rows:
        if row["method"] == "ar" or row[column] is None or row["tokens_per_s"] is None:
            continue
        place = (str(row["cache"]) if by_cache else _way(row), number(row[column]))
        if place not in best or number(row["tokens_per_s"]) > number(best[place]["tokens_per_s"]):
            best[place] = row
    found: list[Row] = []
    for series in dict.fromkeys(name for name, _ in best):
        mine = [best[place] for place in sorted(best) if place[0] == series]
        pays_from, pays_to = paying([(number(row[column]), number(row["speedup"])) for row in mine])
        for row in mine:
            kept = {name: row[name] for name in (*MACHINE, *SETTING, *FOUND[1:], "tag")}
            rate = plain[_machine(row)]["tokens_per_s"]
            paid = {"pays_from": pays_from, "pays_to": pays_to}
            found.append({"series": series, **kept, "ar_tokens_per_s": rate, **paid})
    return found


def paying(points: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Where a speedup crosses 1, upwards for the first time and downwards for the last: None where it does not within
    the points. Between two points it is taken as straight over the logarithm of the place.

    Args:
        points: (place, speedup), by place.
    """
    crossings = [
        (above > 1, math.exp(math.log(here) + (1 - below) / (above - below) * math.log(there / here)))
        for (here, below), (there, above) in zip(points, points[1:], strict=False)
        if (below > 1) != (above > 1)
    ]
    up = [place for rises, place in crossings if rises]
    down = [place for rises, place in crossings if not rises]
    return (up[0] if up else None), (down[-1] if down else None)


def _way(row: Row) -> str:
    policy = "fixed K" if row["policy"] == "fixed" else "truncated"
    return f"{policy}, prefetch" if row["prefetch"] == "yes" else policy


def _machine(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in MACHINE)


def _settings(rows: Iterable[Row]) -> int:
    return len({tuple(row[name] for name in SETTING) for row in rows if row["method"] != "ar"})


def _drafter(rows: Iterable[Row]) -> str:
    return ", ".join(sorted({str(row["drafter"]) for row in rows if row["drafter"]}))


def _draw(figure: Figure, rows: list[Row], axis: Axis) -> None:
    left, right = figure.subplots(1, 2)
    for series, look in zip(dict.fromkeys(str(row["series"]) for row in rows), LOOKS, strict=False):
        mine = [row for row in rows if row["series"] == series]
        places = [number(row[axis.column]) for row in mine]
        draw_series(left, places, mine, "speedup", look, series)
        draw_series(right, places, mine, "tokens_per_s", look, series)
    _draw_ar(right, rows, axis)
    left.axhline(1.0, color=BLACK, linewidth=1.0)
    low, high = left.get_ylim()
    left.axhspan(min(low, 0.9), 1.0, color=LIGHT, alpha=0.5, linewidth=0)
    left.set_ylim(min(low, 0.9), high)
    left.set_title("(a) speedup over AR (grey: AR is faster)")
    right.set_title("(b) tokens/s (thin: AR)")
    right.set_yscale("log")
    plain_log(right.yaxis)
    for axes in (left, right):
        if axis.column == "bandwidth_gb_s":
            axes.set_xscale("log")
            plain_log(axes.xaxis)
        axes.set_xlabel(axis.label)
        axes.grid()
    legend_beside(right)


def _draw_ar(axes: Axes, rows: Sequence[Row], axis: Axis) -> None:
    """AR of each cache, once."""
    for cache in dict.fromkeys(row["cache"] for row in rows):
        mine = [row for row in rows if row["cache"] == cache]
        points = sorted({(number(row[axis.column]), number(row["ar_tokens_per_s"])) for row in mine})
        axes.plot(*zip(*points, strict=True), color=BLACK, linewidth=0.7, alpha=0.7)
