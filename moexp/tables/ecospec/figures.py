"""EcoSpec's figures by name, and of them what a verification step costs and the budget gamma. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.papers import load_paper
from moexp.tables.core.plot import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    GROWTH_COLUMNS,
    ORANGE,
    OTHER_LOOK,
    Look,
    Plot,
    draw_growth,
    draw_series,
    growth_rows,
    number,
    run_source,
    trace_source,
)
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.ecospec.data import AR, CHEAPEST, ECOSPEC, EPSILON, GLOBAL, ORACLE, EcoRun, load_eco_runs, parts_of
from moexp.tables.ecospec.load_figure import expert_load
from moexp.tables.ecospec.tables import table_11

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, FIT = "step", "linear fit"
LOOKS = {
    AR: Look(BLACK, "D", ":"),
    "confidence": Look(ORANGE, "s", "--"),
    ECOSPEC: Look(BLUE, "o", "-"),
    GLOBAL: Look(GREEN, "^", "-."),
}
"""By selection."""

WIDEST = 3  # panels in a row


def ecospec_plots(
    folder: Path, trace: Path | None, samples: int = 2000, only: Collection[str] | None = None
) -> list[Plot]:
    """The figures (those named in `only`; None: all) that a run folder and a trace allow."""
    runs = load_eco_runs(folder, samples)
    found = [make(runs, folder, trace) for name, make in PLOTS.items() if only is None or name in only]
    return [plot for plot in found if plot is not None]


# --- figure 1 ---


def _costs(runs: Sequence[EcoRun], folder: Path, trace: Path | None) -> Plot | None:
    """Panels (a), one a platform, (b) and (c), each of them left out where nothing of it is measured."""
    greedy = [found for run in runs for found in _greedy_runs(run)]
    steps = [_step_rows(run) for run in runs]
    growth, sizes = growth_rows(trace), _size_rows(runs[0])
    rows: list[Row] = [row for of_platform in steps for row in [*_fit_rows(of_platform), *of_platform]]
    sources = provenance_lines(greedy) if rows else [run_source(folder)] if sizes else []
    if trace is not None and growth:
        sources.append(trace_source(trace))
        rows += [{**row, "panel": "b", "series": "union growth"} for row in growth]
    rows += sizes
    if not rows:
        return None
    columns = ["panel", "platform", "series", "tag", "target", "method", "rows", "unique_experts", "verify_ms"]
    columns += [*GROWTH_COLUMNS, "expert_mb"]
    height = 3.3 if len(_panels(rows)) <= WIDEST else 6.0
    return Plot("1", "What verification costs, and why", columns, rows, _draw_costs, height, sources)


def _greedy_runs(run: EcoRun) -> list[Measured]:
    """The main run at T = 0, and those with other budgets, each named with its platform."""
    main = run.by_temperature.get(0.0)
    others = [found for _, found in sorted(run.by_gamma.items()) if found is not main]
    found = others if main is None else [main, *others]
    return [replace(one, name=f"{run.platform} {one.name}") for one in found]


def _step_rows(run: EcoRun) -> list[Row]:
    """One row a verification step. The oracle's are left out: running the target beforehand is no part of a method."""
    return [
        {
            "panel": "a", "platform": run.platform, "series": STEP, "tag": found.tag, "method": method,
            "rows": step.drafted + 1, "unique_experts": step.unique_verify, "verify_ms": 1000 * step.verify_s,
        }
        for found in _greedy_runs(run)
        for method, arms in found.arms.items()
        if parts_of(method)[1] not in (ORACLE, CHEAPEST)
        for arm in arms.values()
        for step in arm.steps
        if step.unique_verify is not None and (step.batch or 1) == 1
    ]  # fmt: skip


def _fit_rows(steps: Sequence[Row]) -> list[Row]:
    """The ends of the line through all steps, by least squares; none where they all touched as many experts."""
    experts, times = ([number(row[name]) for row in steps] for name in ("unique_experts", "verify_ms"))
    if len(set(experts)) < 2:
        return []
    slope, start = statistics.linear_regression(experts, times)
    line: Row = {"panel": "a", "platform": steps[0]["platform"], "series": FIT, "tag": steps[0]["tag"]}
    return [{**line, "unique_experts": x, "verify_ms": start + slope * x} for x in (min(experts), max(experts))]


def _size_rows(run: EcoRun) -> list[Row]:
    if "expert_bytes" not in run.target:
        return []
    sizes = [(str(run.target.get("name")), run.target["expert_bytes"] / 1e6, MEASURED)]
    sizes += [(target, megabytes, PAPER) for target, megabytes in load_paper("ecospec").figures[1]["expert_mb"].items()]
    return [
        {"panel": "c", "series": "expert size", "tag": tag, "target": target, "expert_mb": megabytes}
        for target, megabytes, tag in sizes
    ]


def _panels(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by panel and, of (a), platform."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((str(row["panel"]), str(row.get("platform") or "")), []).append(row)
    return panels


def _draw_costs(figure: Figure, rows: list[Row]) -> None:
    draws = {"a": _draw_steps, "b": _draw_union, "c": _draw_sizes}
    panels = _panels(rows)
    shape = (1, len(panels)) if len(panels) <= WIDEST else (-(-len(panels) // 2), 2)
    places = figure.subplots(*shape, squeeze=False).flat
    for (panel, _), mine in panels.items():
        draws[panel](next(places), mine)
    for axes in places:
        axes.remove()


def _draw_steps(axes: Axes, rows: list[Row]) -> None:
    steps, line = ([row for row in rows if row["series"] == series] for series in (STEP, FIT))
    for selection, look in LOOKS.items():
        mine = [row for row in steps if _selection(str(row["method"])) == selection]
        if mine:
            axes.scatter(
                [number(row["unique_experts"]) for row in mine], [number(row["verify_ms"]) for row in mine],
                s=9, color=look.color, marker=look.marker, alpha=0.5, linewidths=0,
                label="AR" if selection == AR else selection,
            )  # fmt: skip
    if line:
        (left, low), (right, high) = ((number(row["unique_experts"]), number(row["verify_ms"])) for row in line)
        slope = (high - low) / (right - left)
        axes.plot([left, right], [low, high], color=BLACK, linewidth=1.2, label=f"fit: {slope:.2g} ms an expert")
    axes.set_ylim(bottom=0)
    axes.set_title(f"(a) a step, {steps[0]['platform']} ({steps[0]['tag']})")
    axes.set_xlabel("unique experts, all layers")
    axes.set_ylabel("verification, ms")
    axes.grid(axis="y")
    axes.legend(loc="best", fontsize=7, handlelength=1.4, markerscale=1.6)


def _selection(method: str) -> str:
    """The selection that a method belongs to; other checkpoints of the predictor and epsilons count as EcoSpec."""
    if method == AR:
        return AR
    strategy = parts_of(method)[1]
    return ECOSPEC if strategy.startswith((ECOSPEC, EPSILON)) else strategy


def _draw_union(axes: Axes, rows: list[Row]) -> None:
    draw_growth(axes, rows)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.set_title(f"(b) union of experts ({rows[0]['tag']})")
    axes.set_xlabel("verified tokens")
    axes.legend(loc="upper left", fontsize=7, handlelength=1.4)


def _draw_sizes(axes: Axes, rows: list[Row]) -> None:
    places = range(len(rows))
    sizes = [number(row["expert_mb"]) for row in rows]
    axes.barh(places, sizes, 0.4, color=[GREY if row["tag"] == PAPER else BLUE for row in rows])
    for place, row in zip(places, rows, strict=True):
        label = f"{row['target']} ({row['tag']}): {number(row['expert_mb']):.2f} MB"
        axes.text(0, place - 0.27, label, va="bottom", fontsize=7.5)
    axes.set_ylim(len(rows) - 0.6, -0.7)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title("(c) an expert's size")
    axes.set_xlabel("MB an expert")
    axes.grid(axis="x")


# --- gamma ---


def _gamma(runs: Sequence[EcoRun], _: Path, __: Path | None) -> Plot | None:
    """Of table 11, what is measured on the first platform with several budgets; None where there is none."""
    columns = ["target", "platform", "method", "budget", "temperature", "workload", "prompts", "tag"]
    columns += with_ends("alpha", "experts_per_layer")
    for run in runs:
        table = table_11(run, load_paper("ecospec"))
        ours = [{**row, "platform": run.platform} for row in table.rows if row["tag"] != PAPER]
        rows: list[Row] = [{name: row.get(name) for name in columns} for row in ours]
        if len({row["budget"] for row in rows}) > 1:
            title = f"The verification budget gamma ({rows[0]['target']}, {run.platform}, T = 0, all workloads)"
            return Plot("gamma", title, columns, rows, _draw_gamma, 3.3, provenance_lines(table.sources))
    return None


def _draw_gamma(figure: Figure, rows: list[Row]) -> None:
    labels = {"experts_per_layer": "E, unique experts a layer", "alpha": "alpha, tokens a step"}
    panels = figure.subplots(1, 2)
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for place, method in enumerate(dict.fromkeys(str(row["method"]) for row in rows)):
            mine = [row for row in rows if row["method"] == method and row[name] is not None]
            if not mine:
                continue
            budgets = [number(row["budget"]) + 0.06 * place for row in mine]  # intervals do not cover each other
            look = LOOKS.get(_selection(method), OTHER_LOOK)
            draw_series(axes, budgets, mine, name, look, f"{method} ({mine[0]['tag']})")
        axes.set_xticks(sorted({int(number(row["budget"])) for row in rows}))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("gamma, nodes verified a step (line: 95% interval)")
        axes.set_ylabel(label)
        axes.grid(axis="y")
    panels[0].legend(loc="lower right", handlelength=3.2)


PLOTS: dict[str, Callable[[Sequence[EcoRun], Path, Path | None], Plot | None]] = {
    "1": _costs,
    "4": expert_load,
    "gamma": _gamma,
}
"""Figure -> how it is made from runs, their folder and the folder of a trace; None where they do not allow it."""
