"""What EcoSpec's tables share: a method's row, the paper's rows beside ours, and platforms in one table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from moexp import metrics
from moexp.papers import Paper
from moexp.tables.core.rows import rate
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, Table, View, set_interval, text, text_of
from moexp.tables.core.tags import PAPER
from moexp.tables.ecospec.data import AR, ECOSPEC, EcoRun, nodes_verified, parts_of

AVERAGE = "average"
NOT_MEASURED = "Not measured yet"
MEASURED_COLUMNS = ("speedup", "alpha", "experts_per_layer")
TABLE_1_NAMES = {"target": "model", "experts_per_layer": "E"}
"""What Table 1 calls its columns, as the paper does, where the other tables have other names."""
PAPER_COLUMNS = tuple(f"paper_{name}" for name in ("model", "speedup", "alpha", "E"))

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
        set_interval(row, "speedup", run.against(arms, rate, found.arms.get(AR, {}), rate))
    set_interval(row, "alpha", run.over(listed, lambda arm: metrics.alpha(arm.steps)))
    set_interval(row, "experts_per_layer", run.over(listed, lambda arm: metrics.experts_per_layer(arm.steps)))
    rows = metrics.pooled(map(nodes_verified, listed)).value
    if rows is not None:
        row["uniform"] = metrics.uniform_union(int(run.target["num_experts"]), int(run.target["top_k"]), rows)
    return row


def counterpart(target: dict[str, Any], paper: Paper) -> str | None:
    """The paper's target with as many routed experts a layer and the same top-k (Table 13); None where it has none."""
    for row in paper.table(13).rows:
        if (int(str(row["experts"]).split()[0]), row["top_k"]) == (target.get("num_experts"), target.get("top_k")):
            return str(row["target"])
    return None


def paper_beside(row: Row, paper: Paper, model: str | None) -> Row:
    """What the paper's Table 1 reports of `model` by a row's method, on its workload and at its temperature.

    The paper's EcoSpec goes with one drafter a target: ours counts as the same only on top of that drafter.
    """
    theirs = [one for one in paper.table(1).rows if one["target"] == model]
    base, strategy = parts_of(str(row["method"]))
    if base not in {one["method"] for one in theirs}:
        return {}
    method = {"confidence": base, ECOSPEC: ECOSPEC}.get(strategy)
    for one in theirs:
        same = one["method"] == method and one["temperature"] == row["temperature"]
        if same and plain_name(one["workload"]) == plain_name(str(row["workload"])):
            values = (model, one["speedup"], one["alpha"], one["experts_per_layer"])
            return dict(zip(PAPER_COLUMNS, values, strict=True))
    return {}


def plain_name(workload: str) -> str:
    """A workload's name without case and punctuation: the paper's MTBench is our `mt-bench`."""
    return "".join(filter(str.isalnum, workload)).lower()


def renamed(table: Table, names: dict[str, str]) -> Table:
    """The same table with other names for some columns, and those of their intervals."""
    full = {old + end: new + end for old, new in names.items() for end in ("", "_lo", "_hi")}

    def said(name: str) -> str:
        return full.get(name, name)

    views = [replace(view, header=list(map(said, view.header))) for view in table.views]
    rows = [{said(name): value for name, value in row.items()} for row in table.rows]
    return replace(table, columns=list(map(said, table.columns)), rows=rows, views=views)


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
