"""Decoding speed over AR of DraftExpert's methods, with the byte bound, from Table 2."""

from __future__ import annotations

from pathlib import Path

from moexp.tables.core.plot import BLACK, LIGHT, ORANGE, SKY, Axes, Figure, Plot, draw_interval
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Row, number, text_of
from moexp.tables.core.tags import PAPER
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import AR, DRAFT_EXPERT, FIXED, TOP_1_FULL, TRUNCATED
from moexp.tables.draftexpert.table_2 import MEAN, table_2

COLUMNS = ["target", "platform", "method", "workload", "settings", "tag", "prompts"]
COLUMNS += with_ends("speedup", "byte_bound")

LABELS = {
    TOP_1_FULL: "top-1, truncated, prefetch",
    FIXED: "draft-expert, fixed K",
    TRUNCATED: "draft-expert, no prefetch",
}


def figure_speedup(run: Run, trace: Path | None) -> Plot | None:
    """Speedup of each method over all workloads, by platform."""
    table = table_2(run)
    rows: list[Row] = [
        {name: row.get(name) for name in COLUMNS}
        for row in table.rows
        if row["tag"] != PAPER
        and row["workload"] == MEAN
        and row["method"] not in (AR, "top-r")  # the latter repeats the best of the others
        and row["speedup"] is not None
    ]
    if not rows:
        return None
    title = f"Decoding speed over AR, all workloads ({rows[0]['target']})"
    height = 0.24 * len(rows) + 0.33 * len({row["platform"] for row in rows}) + 1.05
    return Plot("speedup", title, COLUMNS, rows, _draw, height, provenance_lines(table.sources))


def _draw(figure: Figure, rows: list[Row]) -> None:
    by_platform: dict[str, list[Row]] = {}
    for row in rows:
        by_platform.setdefault(f"{row['platform']} ({row['tag']})", []).append(row)
    ratios = [len(bars) + 0.6 for bars in by_platform.values()]
    panels = figure.subplots(len(by_platform), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, (title, bars) in zip(panels, by_platform.items(), strict=True):
        _draw_platform(axes, title, bars)
    panels[-1].set_xlim(left=0)
    panels[-1].set_xlabel(
        "speedup, times AR\n(dotted: AR; black line: 95% interval over prompts; upright mark: byte bound alpha k / E)"
    )


def _draw_platform(axes: Axes, title: str, rows: list[Row]) -> None:
    colors = [SKY if str(row["method"]).startswith(DRAFT_EXPERT) else LIGHT for row in rows]
    axes.barh(range(len(rows)), [number(row["speedup"]) for row in rows], 0.66, color=colors)
    for y, row in enumerate(rows):
        draw_interval(axes, row, "speedup", y, color=BLACK, linewidth=1.3)
        if row["byte_bound"] is not None:
            for color, width in (("white", 3.4), (ORANGE, 2)):  # seen on a bar in grey print too
                bound = number(row["byte_bound"])
                axes.plot(bound, y, marker="|", color=color, markersize=11, markeredgewidth=width)
        axes.text(1.01, y, text_of(row, "speedup"), transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [LABELS.get(str(row["method"]), str(row["method"])) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.grid(axis="x")
