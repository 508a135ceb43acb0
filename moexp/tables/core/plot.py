"""What figures share: a PNG and an SVG beside a CSV of what they show, and their look.

A figure is drawn from the rows of its CSV and from nothing else, and every row is tagged. The same records give the
same bytes. matplotlib is imported only to draw, and never through pyplot; torch not at all.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from moexp.base import atomic
from moexp.tables.core.table import Row, number, to_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as MatplotlibAxis
    from matplotlib.figure import Figure
else:
    Axes = MatplotlibAxis = Figure = Any  # matplotlib is imported only to draw

BLUE, ORANGE, GREEN, PURPLE, SKY, LIGHT, GREY, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#AA5588", "#56B4E9", "#D9D9D9", "#8A8A8A", "#222222",
)  # fmt: skip
"""Okabe and Ito's palette, which colour-blind readers can tell apart (purple darkened)."""


@dataclass(frozen=True)
class Look:
    """How a series is drawn. No two series of a figure share a marker or a line: colours are lost in grey print."""

    color: str
    marker: str
    line: str | tuple[int, tuple[float, ...]] = "-"
    hollow: bool = False


PLATFORM_LOOKS = {
    "local-disk": Look(BLUE, "o", "-"),
    "paced-cg": Look(ORANGE, "s", "--"),
    "paced-mn": Look(GREEN, "^", "-."),
    "resident": Look(PURPLE, "D", ":"),
}
OTHER_LOOK = Look(SKY, "v", (0, (6, 1, 1, 1, 1, 1)))
PAPER_LOOK = Look(BLACK, "*", (0, (1, 1.5)), hollow=True)

WIDTH = 8.0  # inches
DPI = 200
FOOTER_PT, FOOTER_CHARS = 6.0, 172

STYLE: dict[str, Any] = {
    "figure.dpi": DPI,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.parse_math": False,  # names and commands are shown as they are
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "moexp",  # ids in an SVG are random otherwise
}

KINDS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}
"""File types of a figure's image, and what each says of itself: no date and no version."""


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        name: of its files, `figure_<name>`.
        columns, rows: of the CSV; each row has a tag.
        draw: fills an empty figure from the rows.
        height: in inches, the footer not included.
        sources: lines that say where the values come from, for the footer.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Row]
    draw: Callable[[Figure, list[Row]], None]
    height: float
    sources: list[str]


Data = TypeVar("Data")


class FigureSpec(NamedTuple, Generic[Data]):
    """How a figure is made: from a run's data and the folder of a routing trace; None where they do not allow it.

    `tables` are those whose runs it is drawn from; none: the routing trace alone.
    """

    make: Callable[[Data, Path | None], Plot | None]
    tables: tuple[int, ...]


def make_plots(specs: Mapping[str, FigureSpec[Data]], data: Data, trace: Path | None, only: str | None) -> list[Plot]:
    """The figures (the one named `only`, or all) that the data and the trace allow."""
    plots = [spec.make(data, trace) for name, spec in specs.items() if only in (None, name)]
    return [plot for plot in plots if plot is not None]


def write_plot(folder: Path, plot: Plot) -> list[Path]:
    """Writes `figure_<name>` as PNG, SVG and CSV; returns the three paths.

    Raises:
        AssertionError: a row without a tag, or with a column that the figure has not.
    """
    assert all(row.get("tag") for row in plot.rows), plot.name
    table = to_csv(plot.columns, plot.rows)
    files = [folder / f"figure_{plot.name}.{kind}" for kind in (*KINDS, "csv")]
    for file, kind in zip(files, KINDS, strict=False):
        atomic.write_bytes(file, render(plot, kind))
    atomic.write_text(files[-1], table)
    return files


def render(plot: Plot, kind: str = "png") -> bytes:
    """The image as a file of one of `KINDS`, the same bytes for the same plot."""
    import matplotlib.style
    from matplotlib.figure import Figure

    lines = [part for line in plot.sources for part in textwrap.wrap(line, FOOTER_CHARS, break_on_hyphens=False)]
    below = (len(lines) * 1.3 + 1.0) * FOOTER_PT / 72
    height = plot.height + below
    out = io.BytesIO()
    with matplotlib.style.context(STYLE, after_reset=True):  # whatever the user's own settings are
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        engine: Any = figure.get_layout_engine()
        engine.set(rect=(0, below / height, 1, 1 - below / height), w_pad=0.08, h_pad=0.06)
        figure.suptitle(plot.title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        plot.draw(figure, plot.rows)
        bottom = 0.5 * FOOTER_PT / 72 / height
        figure.text(0.01, bottom, "\n".join(lines), fontsize=FOOTER_PT, color="#555555", va="bottom", linespacing=1.3)
        figure.savefig(out, format=kind, metadata=KINDS[kind])
    return out.getvalue()


# --- series ---


def draw_series(
    axes: Axes, xs: Sequence[float], rows: Sequence[Row], name: str, look: Look, label: str, *, joined: bool = True
) -> None:
    """A series of a column's values at `xs`, with their intervals where the rows have them; `joined` by a line."""
    axes.plot(
        xs, [number(row[name]) for row in rows], color=look.color, marker=look.marker, label=label,
        linestyle=look.line if joined else "none", markersize=8 if look.marker == "*" else 5, linewidth=1.4,
        markerfacecolor="white" if look.hollow else look.color,
    )  # fmt: skip
    for x, row in zip(xs, rows, strict=True):
        if row.get(f"{name}_lo") is not None:
            ends = [number(row[f"{name}_lo"]), number(row[f"{name}_hi"])]
            axes.plot([x, x], ends, color=look.color, linewidth=1.2, alpha=0.7, marker="_", markersize=4)


def draw_interval(axes: Axes, row: Row, name: str, y: float, *, factor: float = 1.0, **style: Any) -> None:
    """The interval of a horizontal bar, where the row has one."""
    if row[f"{name}_lo"] is not None:
        ends = [factor * number(row[f"{name}_lo"]), factor * number(row[f"{name}_hi"])]
        axes.plot(ends, [y, y], **style)


def counted_axis(axes: Axes, rows: Sequence[Row], column: str) -> None:
    """Ticks of the x axis at the column's whole numbers, and values that begin at 0."""
    axes.set_xticks(sorted({int(number(row[column])) for row in rows}))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")


def legend_beside(axes: Axes) -> None:
    """The legend to the right of the panel, off the data."""
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), handlelength=3.2)


def plain_log(axis: MatplotlibAxis) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
