"""EcoSpec's figure 1: what a verification step costs against the experts it touches, and why."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moexp.papers import load_paper
from moexp.tables.core.plot import BLACK, BLUE, GREY, Axes, Figure, Plot
from moexp.tables.core.provenance import provenance_lines, run_source, trace_source
from moexp.tables.core.routing_trace import GROWTH_COLUMNS, draw_growth, growth_rows
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, number
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.ecospec.data import AR, CHEAPEST, ORACLE, EcoRun, parts_of
from moexp.tables.ecospec.figure_gamma import LOOKS, selection_of

STEP, FIT = "step", "linear fit"
WIDEST = 3  # panels in a row
COLUMNS = ["panel", "platform", "series", "tag", "target", "method", "rows", "unique_experts", "verify_ms"]
COLUMNS += [*GROWTH_COLUMNS, "expert_mb"]


def figure_1(runs: Sequence[EcoRun], trace: Path | None) -> Plot | None:
    """Panels (a) steps, one a platform, (b) unions and (c) sizes, each left out where nothing of it is measured.

    Paper: EcoSpec Figure 1.
    """
    rows: list[Row] = []
    for run in runs:
        steps = _step_rows(run)
        rows += [*_fit_rows(steps), *steps]
    growth, sizes = growth_rows(trace), _size_rows(runs[0])
    greedy = [measured for run in runs for measured in _greedy_runs(run)]
    sources = provenance_lines(greedy) if rows else [run_source(runs[0].folder)] if sizes else []
    if trace is not None and growth:
        sources.append(trace_source(trace))
        rows += [{**row, "panel": "b", "series": "union growth"} for row in growth]
    rows += sizes
    if not rows:
        return None
    height = 3.3 if len(_panels(rows)) <= WIDEST else 6.0
    return Plot("1", "What verification costs, and why", COLUMNS, rows, _draw, height, sources)


def _greedy_runs(run: EcoRun) -> list[Measured]:
    """The main run at T = 0, and those with other budgets, each named with its platform."""
    others = [measured for _, measured in sorted(run.by_gamma.items()) if measured is not run.greedy]
    runs = others if run.greedy is None else [run.greedy, *others]
    return [replace(measured, name=f"{run.platform} {measured.name}") for measured in runs]


def _step_rows(run: EcoRun) -> list[Row]:
    """One row a verification step. The oracle's are left out: running the target beforehand is no part of a method."""
    return [
        {
            "panel": "a", "platform": run.platform, "series": STEP, "tag": measured.tag, "method": method,
            "rows": step.drafted + 1, "unique_experts": step.unique_verify, "verify_ms": 1000 * step.verify_s,
        }
        for measured in _greedy_runs(run)
        for method, arms in measured.arms.items()
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


def _draw(figure: Figure, rows: list[Row]) -> None:
    draws = {"a": _draw_steps, "b": _draw_union, "c": _draw_sizes}
    panels = _panels(rows)
    shape = (1, len(panels)) if len(panels) <= WIDEST else (-(-len(panels) // 2), 2)
    grid = figure.subplots(*shape, squeeze=False).flat
    for (panel, _), panel_rows in panels.items():
        draws[panel](next(grid), panel_rows)
    for axes in grid:
        axes.remove()


def _draw_steps(axes: Axes, rows: list[Row]) -> None:
    steps, line = ([row for row in rows if row["series"] == series] for series in (STEP, FIT))
    for selection, look in LOOKS.items():
        points = [row for row in steps if selection_of(str(row["method"])) == selection]
        if points:
            axes.scatter(
                [number(row["unique_experts"]) for row in points], [number(row["verify_ms"]) for row in points],
                s=9, color=look.color, marker=look.marker, alpha=0.5, linewidths=0,
                label="AR" if selection == AR else selection,
            )  # fmt: skip
    if line:
        (left, low), (right, high) = ((number(row["unique_experts"]), number(row["verify_ms"])) for row in line)
        slope = (high - low) / (right - left)
        axes.plot([left, right], [low, high], color=BLACK, linewidth=1.2, label=f"fit: {slope:.2g} ms an expert")
    axes.set_ylim(bottom=0)
    axes.set_title(f"(a) a step, {steps[0]['platform']} ({steps[0]['tag']})")
    axes.set(xlabel="unique experts, all layers", ylabel="verification, ms")
    axes.grid(axis="y")
    axes.legend(loc="best", fontsize=7, handlelength=1.4, markerscale=1.6)


def _draw_union(axes: Axes, rows: list[Row]) -> None:
    draw_growth(axes, rows)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.set(title=f"(b) union of experts ({rows[0]['tag']})", xlabel="verified tokens")
    axes.legend(loc="upper left", fontsize=7, handlelength=1.4)


def _draw_sizes(axes: Axes, rows: list[Row]) -> None:
    sizes = [number(row["expert_mb"]) for row in rows]
    axes.barh(range(len(rows)), sizes, 0.4, color=[GREY if row["tag"] == PAPER else BLUE for row in rows])
    for y, row in enumerate(rows):
        label = f"{row['target']} ({row['tag']}): {number(row['expert_mb']):.2f} MB"
        axes.text(0, y - 0.27, label, va="bottom", fontsize=7.5)
    axes.set(ylim=(len(rows) - 0.6, -0.7), yticks=[], title="(c) an expert's size", xlabel="MB an expert")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
