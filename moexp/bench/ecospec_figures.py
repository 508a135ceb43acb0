"""EcoSpec's figures: what a verification step costs, how experts are loaded, and the budget gamma. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.bench.ecospec_data import AR, CHEAPEST, ECOSPEC, EPSILON, GLOBAL, ORACLE, EcoRun, load_eco_runs, parts_of
from moexp.bench.ecospec_tables import table_11
from moexp.bench.plot import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    GROWTH_COLUMNS,
    LOAD,
    ORANGE,
    Plot,
    draw_growth,
    growth_rows,
    number,
    read_trace,
    run_source,
    trace_source,
)
from moexp.bench.rows import with_ends
from moexp.papers import Paper, load_paper
from moexp.report import MEASURED, PAPER, Measured, Row, provenance_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, FIT = "step", "linear fit"
COLORS = {AR: BLACK, "confidence": ORANGE, ECOSPEC: BLUE, GLOBAL: GREEN}
"""By selection."""

WIDEST = 3  # panels in a row
SPREAD = ("lowest", "lower_quartile", "median", "upper_quartile", "highest")
MOST = 4.0  # the heatmap's colours end at this many times the mean, and at its inverse
UNUSED = 1e-9  # where an expert that no token chose stands on a log scale: beyond its end


def ecospec_plots(folder: Path, trace: Path | None, samples: int = 2000) -> list[Plot]:
    """The figures that a run folder and a trace allow."""
    runs, paper = load_eco_runs(folder, samples), load_paper("ecospec")
    found = [_costs(runs, paper, folder, trace), _load(trace), _gamma(runs, paper)]
    return [plot for plot in found if plot is not None]


# --- figure 1 ---


def _costs(runs: Sequence[EcoRun], paper: Paper, folder: Path, trace: Path | None) -> Plot | None:
    """Panels (a), one a platform, (b) and (c), each of them left out where nothing of it is measured."""
    greedy = [found for run in runs for found in _greedy_runs(run)]
    steps = [_step_rows(run) for run in runs]
    growth, sizes = growth_rows(trace), _size_rows(runs[0], paper)
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


def _size_rows(run: EcoRun, paper: Paper) -> list[Row]:
    if "expert_bytes" not in run.target:
        return []
    sizes = [(str(run.target.get("name")), run.target["expert_bytes"] / 1e6, MEASURED)]
    sizes += [(target, megabytes, PAPER) for target, megabytes in paper.figures[1]["expert_mb"].items()]
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
    for selection, color in COLORS.items():
        mine = [row for row in steps if _selection(str(row["method"])) == selection]
        if mine:
            axes.scatter(
                [number(row["unique_experts"]) for row in mine], [number(row["verify_ms"]) for row in mine],
                s=9, color=color, alpha=0.5, linewidths=0, label="AR" if selection == AR else selection,
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
    axes.legend(loc="best", fontsize=7, handlelength=1.4)


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


# --- figure 4 ---


def _load(trace: Path | None) -> Plot | None:
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
    image = heat.imshow(grid, norm=LogNorm(1 / MOST, MOST), cmap="PuOr_r", aspect="auto", interpolation="nearest")
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


# --- gamma ---


def _gamma(runs: Sequence[EcoRun], paper: Paper) -> Plot | None:
    """Of table 11, what is measured on the first platform with several budgets; None where there is none."""
    columns = ["target", "platform", "method", "budget", "temperature", "workload", "prompts", "tag"]
    columns += with_ends("alpha", "experts_per_layer")
    for run in runs:
        table = table_11(run, paper)
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
        for method in dict.fromkeys(str(row["method"]) for row in rows):
            mine = [row for row in rows if row["method"] == method and row[name] is not None]
            if not mine:
                continue
            color = COLORS.get(_selection(method), GREY)
            marker = "o" if _selection(method) == ECOSPEC else "s"
            budgets = [number(row["budget"]) for row in mine]
            values = [number(row[name]) for row in mine]
            axes.plot(budgets, values, color=color, marker=marker, markersize=5, label=f"{method} ({mine[0]['tag']})")
            for budget, row in zip(budgets, mine, strict=True):
                if row[f"{name}_lo"] is not None:
                    ends = [number(row[f"{name}_lo"]), number(row[f"{name}_hi"])]
                    axes.plot([budget, budget], ends, color=color, linewidth=1.2, alpha=0.6)
        axes.set_xticks(sorted({int(number(row["budget"])) for row in rows}))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("gamma, nodes verified a step (line: 95% interval)")
        axes.set_ylabel(label)
        axes.grid(axis="y")
    panels[0].legend(loc="lower right")
