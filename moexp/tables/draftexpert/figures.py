"""DraftExpert's figures by name, and of them speedup, acceptance by position, and figure 5. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.papers import load_paper
from moexp.tables.core.plot import (
    BLACK,
    GROWTH_COLUMNS,
    LIGHT,
    ORANGE,
    OTHER_LOOK,
    SKY,
    Plot,
    draw_growth,
    draw_series,
    growth_rows,
    legend_beside,
    number,
    run_source,
    trace_source,
)
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Row, text_of
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.draftexpert.data import Run, load_run
from moexp.tables.draftexpert.draft_figures import DRAFTER_LOOKS, OURS, expansion, tradeoff
from moexp.tables.draftexpert.labels import AR, FIXED, TOP_1_FULL, TRUNCATED
from moexp.tables.draftexpert.load_figures import offloading, verification
from moexp.tables.draftexpert.speed import table_2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    TOP_1_FULL: "top-1, truncated, prefetch",
    FIXED: "draft-expert, fixed K",
    TRUNCATED: "draft-expert, no prefetch",
}


def draftexpert_plots(
    folder: Path, trace: Path | None, samples: int = 2000, only: Collection[str] | None = None
) -> list[Plot]:
    """The figures (those named in `only`; None: all) that a run folder and a trace allow."""
    run = load_run(folder, samples)
    found = [make(run, folder, trace) for name, make in PLOTS.items() if only is None or name in only]
    return [plot for plot in found if plot is not None]


# --- speedup ---


def _speedup(run: Run, _: Path, __: Path | None) -> Plot | None:
    table = table_2(run, load_paper("draftexpert"))
    columns = ["target", "platform", "method", "workload", "settings", "tag", "prompts"]
    columns += with_ends("speedup", "byte_bound")
    rows: list[Row] = [
        {name: row.get(name) for name in columns}
        for row in table.rows
        if row["tag"] != PAPER
        and row["workload"] == "mean"
        and row["method"] not in (AR, "top-r")  # the latter repeats the best of the others
        and row["speedup"] is not None
    ]
    if not rows:
        return None
    title = f"Decoding speed over AR, all workloads ({rows[0]['target']})"
    panels = len({row["platform"] for row in rows})
    height = 0.24 * len(rows) + 0.33 * panels + 1.05
    return Plot("speedup", title, columns, rows, _draw_speedup, height, provenance_lines(table.sources))


def _draw_speedup(figure: Figure, rows: list[Row]) -> None:
    by_platform: dict[str, list[Row]] = {}
    for row in rows:
        by_platform.setdefault(f"{row['platform']} ({row['tag']})", []).append(row)
    ratios = [len(mine) + 0.6 for mine in by_platform.values()]
    panels = figure.subplots(len(by_platform), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, (title, mine) in zip(panels, by_platform.items(), strict=True):
        places = range(len(mine))
        colors = [SKY if str(row["method"]).startswith(OURS) else LIGHT for row in mine]
        axes.barh(places, [number(row["speedup"]) for row in mine], 0.66, color=colors)
        for place, row in zip(places, mine, strict=True):
            if row["speedup_lo"] is not None:
                ends = [number(row["speedup_lo"]), number(row["speedup_hi"])]
                axes.plot(ends, [place, place], color=BLACK, linewidth=1.3)
            if row["byte_bound"] is not None:
                for color, width in (("white", 3.4), (ORANGE, 2)):  # seen on a bar in grey print too
                    bound = number(row["byte_bound"])
                    axes.plot(bound, place, marker="|", color=color, markersize=11, markeredgewidth=width)
            words = text_of(row, "speedup")
            axes.text(1.01, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
        axes.set_yticks(places, [LABELS.get(str(row["method"]), str(row["method"])) for row in mine])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_title(title)
        axes.grid(axis="x")
    panels[-1].set_xlim(left=0)
    panels[-1].set_xlabel(
        "speedup, times AR\n(dotted: AR; black line: 95% interval over prompts; upright mark: byte bound alpha k / E)"
    )


# --- acceptance by position ---


def _acceptance(run: Run, folder: Path, _: Path | None) -> Plot | None:
    columns = ["target", "drafter", "position", "acceptance", "blocks", "tag"]
    rows: list[Row] = [
        {
            "target": run.target.get("name"), "drafter": drafter, "position": position, "acceptance": share,
            "blocks": found.get("blocks"), "tag": MEASURED,
        }
        for drafter, found in run.draft.items()
        for position, share in enumerate(found.get("by_position") or (), 1)
    ]  # fmt: skip
    if not rows:
        return None
    title = f"Acceptance by position in the draft, held-out text ({rows[0]['target']})"
    return Plot("acceptance", title, columns, rows, _draw_acceptance, 3.6, [run_source(folder)])


def _draw_acceptance(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    for drafter in dict.fromkeys(str(row["drafter"]) for row in rows):
        mine = [row for row in rows if row["drafter"] == drafter]
        places = [number(row["position"]) for row in mine]
        look = DRAFTER_LOOKS.get(drafter, OTHER_LOOK)
        draw_series(axes, places, mine, "acceptance", look, f"{drafter} ({mine[0]['tag']})")
    axes.set_xticks(sorted({int(number(row["position"])) for row in rows}))
    axes.set_ylim(0, 1)
    axes.set_xlabel("drafted position, tokens")
    axes.set_ylabel("share of blocks accepted\nup to this position")
    axes.grid(axis="y")
    legend_beside(axes)


# --- figure 5 ---


def _growth(_: Run, __: Path, trace: Path | None) -> Plot | None:
    rows = growth_rows(trace)
    if trace is None or not rows:
        return None
    title = "Experts that verifying a block of consecutive tokens touches"
    return Plot("5", title, [*GROWTH_COLUMNS, "tag"], rows, _draw_growth, 3.6, [trace_source(trace)])


def _draw_growth(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    draw_growth(axes, rows)
    axes.set_xlabel("block length, tokens")
    legend_beside(axes)


PLOTS: dict[str, Callable[[Run, Path, Path | None], Plot | None]] = {
    "1": offloading,
    "2": tradeoff,
    "3": expansion,
    "4": verification,
    "5": _growth,
    "speedup": _speedup,
    "acceptance": _acceptance,
}
"""Figure -> how it is made from a run, its folder and the folder of a trace; None where they do not allow it."""
