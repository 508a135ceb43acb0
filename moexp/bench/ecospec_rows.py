"""What EcoSpec's tables share: a method's row, the paper's rows beside ours, and platforms in one table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moexp import metrics
from moexp.bench.ecospec_data import AR, EcoRun, nodes_verified
from moexp.bench.rows import rate
from moexp.papers import Paper
from moexp.report import PAPER, Measured, Row, Table, View, put, text, text_of

AVERAGE = "average"
NOT_MEASURED = "Not measured yet"
MEASURED_COLUMNS = ("speedup", "alpha", "experts_per_layer")

NOTES = (
    "`experts_per_layer` is the paper's E: unique experts a MoE layer and verification step. `uniform` is what "
    "independent uniform routing of as many rows would touch; tokens of one text share experts.",
    "`speedup` is tokens (counted by ids) a second over AR's, same store, one interleaved run; intervals are 95% "
    "bootstrap intervals over prompts. The paper's figures are of other models, with experts in GPU memory.",
)


def measured_row(run: EcoRun, found: Measured, method: str, workload: str, temperature: float) -> Row:
    """Speedup, alpha and E of one method on one workload (or on all of them)."""
    arms = {n: arm for n, arm in found.arms[method].items() if workload in (arm.request.workload, AVERAGE)}
    listed = list(arms.values())
    row: Row = {
        "target": run.target.get("name"),
        "method": method,
        "temperature": temperature,
        "workload": workload,
        "prompts": len(listed),
        "tag": found.tag,
    }
    if method != AR:
        put(row, "speedup", run.against(arms, rate, found.arms.get(AR, {}), rate))
    put(row, "alpha", run.over(listed, lambda arm: metrics.alpha(arm.steps)))
    put(row, "experts_per_layer", run.over(listed, lambda arm: metrics.experts_per_layer(arm.steps)))
    rows = metrics.pooled(map(nodes_verified, listed)).value
    if rows is not None:
        row["uniform"] = metrics.uniform_union(int(run.target["num_experts"]), int(run.target["top_k"]), rows)
    return row


def workloads_of(found: Measured) -> list[str]:
    return list(dict.fromkeys(arm.request.workload for arms in found.arms.values() for arm in arms.values()))


def cells(row: Row, names: Iterable[str], digits: int = 2) -> list[str]:
    """Values as a reader wants them, with their intervals where they have any."""
    return [text_of(row, name, 2) if f"{name}_lo" in row else text(row.get(name), digits) for name in names]


def add_paper(table: Table, paper: Paper, shown: Callable[[dict[str, Any]], bool] = lambda row: True) -> None:
    """The paper's rows in the CSV, and those `shown` as a view."""
    rows = paper.table(table.number).rows
    for row in rows:
        table.rows.append({**row, "tag": PAPER})
        table.columns = [*table.columns, *(name for name in row if name not in table.columns)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table.views.append(View("Paper", names, [[text(row.get(name)) for name in names] for row in rows if shown(row)]))
    if not table.sources:
        table.notes.append(f"{NOT_MEASURED}: run `moexp bench --paper ecospec --table {table.number}`.")


def merged(by_platform: Sequence[tuple[str, Table]]) -> Table:
    """One table of several platforms' tables: their own rows and views in turn, then the paper's, once."""
    whole = by_platform[0][1]
    sources = [source for _, table in by_platform for source in table.sources]
    if not sources:
        return whole
    rows: list[Row] = []
    for platform, table in by_platform:
        rows += [{**row, "platform": platform} for row in table.rows if row["tag"] != PAPER]
    views = [view for _, table in by_platform for view in table.views[:-1] if view.rows]
    return Table(
        whole.number,
        whole.title,
        [*whole.columns[:1], "platform", *whole.columns[1:]],
        rows + [row for row in whole.rows if row["tag"] == PAPER],
        [*views, whole.views[-1]],
        [note for note in whole.notes if not note.startswith(NOT_MEASURED)],
        sources,
    )
