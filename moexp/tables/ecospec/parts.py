"""What EcoSpec's tables share: a method's row, the paper's rows beside ours, and platforms in one table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from moexp import metrics
from moexp.metrics import Ratio
from moexp.papers import load_paper
from moexp.tables.core.rows import rate, steps_of
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Columns, Row, Table, View, set_interval, shown, text, view_of
from moexp.tables.core.tags import PAPER
from moexp.tables.ecospec.data import AR, EcoRun

AVERAGE = "average"
NOT_MEASURED = "Not measured yet"
MEASURED_COLUMNS = ("speedup", "alpha", "experts_per_layer")
SPEEDUP, ALPHA, EXPERTS = (shown(name, ends=True) for name in MEASURED_COLUMNS)
FIGURES: Columns = {"speedup": SPEEDUP, "alpha": ALPHA, "E": EXPERTS}
"""Of a view."""

NOTES = (
    "`experts_per_layer` is the paper's E: unique experts a MoE layer and verification step. `uniform` is what "
    "independent uniform routing of as many rows would touch; tokens of one text share experts.",
    "`speedup` is tokens (counted by ids) a second over AR's, same store, one interleaved run; intervals are 95% "
    "bootstrap intervals over prompts. The paper's figures are of other models, with experts in GPU memory.",
)


def measured_row(
    run: EcoRun, measured: Measured, method: str, workload: str = AVERAGE, temperature: float = 0.0
) -> Row:
    """Speedup, alpha and E of one method on one workload (or on all of them)."""
    arms = {n: arm for n, arm in measured.arms[method].items() if workload in (arm.request.workload, AVERAGE)}
    row: Row = {
        "target": run.target.get("name"), "method": method, "temperature": temperature, "workload": workload,
        "prompts": len(arms), "tag": measured.tag,
    }  # fmt: skip
    if method != AR:
        set_interval(row, "speedup", run.against(arms, rate, measured.arms.get(AR, {}), rate))
    row |= run.cells(arms, alpha=metrics.alpha, experts_per_layer=metrics.experts_per_layer)
    nodes = metrics.pooled(Ratio(step.drafted + 1, 1) for step in steps_of(arms)).value  # the pending token included
    if nodes is not None:
        row["uniform"] = metrics.uniform_union(int(run.target["num_experts"]), int(run.target["top_k"]), nodes)
    return row


def only(row: Row, columns: Iterable[str]) -> Row:
    """A row without the cells that a table has no column for."""
    return {name: row[name] for name in columns if name in row}


def workloads_of(measured: Measured) -> list[str]:
    """Workloads of a run, in order."""
    return list(dict.fromkeys(arm.request.workload for arms in measured.arms.values() for arm in arms.values()))


def add_run(table: Table, run: EcoRun, measured: Measured, rows: Sequence[Row], columns: Columns, when: str) -> None:
    """Adds what one run gives a table: its rows, and a view of them; `when` says of what run, in the view's title."""
    table.sources.append(measured)
    table.rows += rows
    table.views.append(view_of(f"{run.platform} ({measured.tag}){when}", rows, columns))


def add_paper(table: Table, is_shown: Callable[[dict[str, Any]], bool] = lambda row: True) -> Table:
    """Adds the paper's rows, and a view of those that are shown; returns the table."""
    rows = load_paper("ecospec").table(table.number).rows
    names = list(dict.fromkeys(name for row in rows for name in row))
    table.rows += [{**row, "tag": PAPER} for row in rows]
    table.columns = [*table.columns, *(name for name in names if name not in table.columns)]
    table.views.append(View("Paper", names, [[text(row.get(name)) for name in names] for row in rows if is_shown(row)]))
    if not table.sources:
        table.notes.append(f"{NOT_MEASURED}: run `moexp bench --paper ecospec --table {table.number}`.")
    return table


def merged(by_platform: Sequence[tuple[str, Table]]) -> Table:
    """One table of several platforms' tables: their own rows and views in turn, then the paper's, once."""
    first = by_platform[0][1]
    sources = [source for _, table in by_platform for source in table.sources]
    if not sources:
        return first
    rows: list[Row] = []
    for platform, table in by_platform:
        rows += [{**row, "platform": platform} for row in table.rows if row["tag"] != PAPER]
    return replace(
        first,
        columns=[*first.columns[:1], "platform", *first.columns[1:]],
        rows=rows + first.paper_rows,
        views=[*(view for _, table in by_platform for view in table.views[:-1] if view.rows), first.views[-1]],
        notes=[note for note in first.notes if not note.startswith(NOT_MEASURED)],
        sources=sources,
    )
