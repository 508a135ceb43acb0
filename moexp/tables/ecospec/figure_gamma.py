"""The verification budget gamma, from EcoSpec's Table 11: unique experts and tokens a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moexp.tables.core.plot import BLACK, BLUE, GREEN, ORANGE, OTHER_LOOK, Figure, Look, Plot, counted_axis, draw_series
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Row, grouped, number
from moexp.tables.core.tags import PAPER
from moexp.tables.ecospec.data import AR, CONFIDENCE, ECOSPEC, EPSILON, GLOBAL, EcoRun, parts_of
from moexp.tables.ecospec.tables_5_11_12 import table_11

COLUMNS = ["target", "platform", "method", "budget", "temperature", "workload", "prompts", "tag"]
COLUMNS += with_ends("alpha", "experts_per_layer")

LOOKS = {
    AR: Look(BLACK, "D", ":"),
    CONFIDENCE: Look(ORANGE, "s", "--"),
    ECOSPEC: Look(BLUE, "o", "-"),
    GLOBAL: Look(GREEN, "^", "-."),
}
"""By selection."""


def selection_of(method: str) -> str:
    """The selection that a method belongs to; other checkpoints of the predictor and epsilons count as EcoSpec."""
    if method == AR:
        return AR
    strategy = parts_of(method)[1]
    return ECOSPEC if strategy.startswith((ECOSPEC, EPSILON)) else strategy


def figure_gamma(runs: Sequence[EcoRun], trace: Path | None) -> Plot | None:
    """What is measured on the first platform with several budgets; None where there is none.

    Paper: EcoSpec Table 11.
    """
    for run in runs:
        table = table_11(run)
        rows: list[Row] = [
            {name: row.get(name) for name in COLUMNS} | {"platform": run.platform}
            for row in table.rows
            if row["tag"] != PAPER
        ]
        if len({row["budget"] for row in rows}) > 1:
            title = f"The verification budget gamma ({rows[0]['target']}, {run.platform}, T = 0, all workloads)"
            return Plot("gamma", title, COLUMNS, rows, _draw, 3.3, provenance_lines(table.sources))
    return None


def _draw(figure: Figure, rows: list[Row]) -> None:
    labels = {"experts_per_layer": "E, unique experts a layer", "alpha": "alpha, tokens a step"}
    panels = figure.subplots(1, 2)
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for index, (method, method_rows) in enumerate(grouped(rows, "method").items()):
            points = [row for row in method_rows if row[name] is not None]
            if points:
                budgets = [number(row["budget"]) + 0.06 * index for row in points]  # intervals do not cover each other
                look = LOOKS.get(selection_of(method), OTHER_LOOK)
                draw_series(axes, budgets, points, name, look, f"{method} ({points[0]['tag']})")
        counted_axis(axes, rows, "budget")
        axes.set(xlabel="gamma, nodes verified a step (line: 95% interval)", ylabel=label)
    panels[0].legend(loc="lower right", handlelength=3.2)
