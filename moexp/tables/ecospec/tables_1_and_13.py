"""EcoSpec's Table 1 from raw records, speedup, acceptance length and unique experts; and Table 13, the targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moexp.papers import load_paper
from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Columns, Row, Table, paper_table, view_of
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.ecospec.data import CONFIDENCE, ECOSPEC, EcoRun, parts_of
from moexp.tables.ecospec.parts import (
    AVERAGE,
    FIGURES,
    MEASURED_COLUMNS,
    NOTES,
    add_paper,
    measured_row,
    workloads_of,
)

NAMES = {"target": "model", "experts_per_layer": "E"}
"""What Table 1 calls its columns, as the paper does, where the other tables have other names."""

PAPER_COLUMNS = tuple(f"paper_{name}" for name in ("model", "speedup", "alpha", "E"))

COLUMNS = ["target", "method", "temperature", "workload", "prompts", "tag", "uniform", *with_ends(*MEASURED_COLUMNS)]

GEOMETRY = ["target", "tag", "blocks", "moe_layers", "dense_layers", "experts", "top_k", "max_context", "total_active"]
GEOMETRY_VIEW: Columns = {
    "target": "target",
    "blocks": "blocks",
    "MoE layers": "moe_layers",
    "experts": "experts",
    "top-k": "top_k",
}


def table_1(run: EcoRun) -> Table:
    """Speedup, acceptance length and E by method, temperature and workload, in long form.

    Where the paper has a target of the same geometry, its figures stand in the same row.

    Paper: EcoSpec Table 1.
    """
    table = paper_table("ecospec", 1, COLUMNS, NOTES[0].replace("experts_per_layer", "E"), NOTES[1])
    model = counterpart(run.target)
    for temperature, measured in run.by_temperature.items():
        averages = []
        for method in measured.arms:
            if parts_of(method)[1] in (CONFIDENCE, ECOSPEC):
                workloads = [*workloads_of(measured), AVERAGE]
                rows = [measured_row(run, measured, method, workload, temperature) for workload in workloads]
                table.rows += [row | paper_beside(row, model) for row in rows]
                averages.append(rows[-1])
        table.sources.append(measured)
        title = f"{run.platform} ({measured.tag}), T = {temperature:g}, all workloads"
        table.views.append(view_of(title, averages, {"method": "method", **FIGURES, "uniform": "uniform"}))
    add_paper(table, lambda row: row["workload"] == "Average")
    table.columns = [*table.columns, *PAPER_COLUMNS]
    if model is not None and table.sources:
        table.notes.append(f"`paper_*` in the CSV: {model}, which has as many routed experts and the same top-k.")
    return _renamed(table)


def counterpart(target: dict[str, Any]) -> str | None:
    """The paper's target with as many routed experts a layer and the same top-k (Table 13); None where it has none."""
    for row in load_paper("ecospec").table(13).rows:
        if (int(str(row["experts"]).split()[0]), row["top_k"]) == (target.get("num_experts"), target.get("top_k")):
            return str(row["target"])
    return None


def paper_beside(row: Row, model: str | None) -> Row:
    """What the paper's Table 1 reports of `model` by a row's method, on its workload and at its temperature.

    The paper's EcoSpec goes with one drafter a target: ours counts as the same only on top of that drafter.
    """
    of_model = [one for one in load_paper("ecospec").table(1).rows if one["target"] == model]
    base, strategy = parts_of(str(row["method"]))
    if base not in {one["method"] for one in of_model}:
        return {}
    method = {CONFIDENCE: base, ECOSPEC: ECOSPEC}.get(strategy)
    for one in of_model:
        same = one["method"] == method and one["temperature"] == row["temperature"]
        if same and plain_name(one["workload"]) == plain_name(str(row["workload"])):
            values = (model, one["speedup"], one["alpha"], one["experts_per_layer"])
            return dict(zip(PAPER_COLUMNS, values, strict=True))
    return {}


def plain_name(workload: str) -> str:
    """A workload's name without case and punctuation: the paper's MTBench is our `mt-bench`."""
    return "".join(filter(str.isalnum, workload)).lower()


def _renamed(table: Table) -> Table:
    """The same table with Table 1's names of columns, and of those of their intervals."""
    new = {old + end: name + end for old, name in NAMES.items() for end in ("", "_lo", "_hi")}
    return replace(
        table,
        columns=[new.get(name, name) for name in table.columns],
        rows=[{new.get(name, name): value for name, value in row.items()} for row in table.rows],
        views=[replace(view, header=[new.get(name, name) for name in view.header]) for view in table.views],
    )


def table_13(run: EcoRun) -> Table:
    """The paper's targets, and ours where anything is measured on it.

    Paper: EcoSpec Table 13.
    """
    table = paper_table("ecospec", 13, GEOMETRY)
    target = run.target
    if target:
        table.rows.append({
            "target": target["name"], "tag": MEASURED, "blocks": target["layers"], "moe_layers": target["moe_layers"],
            "dense_layers": target["layers"] - target["moe_layers"], "top_k": target["top_k"],
            "experts": f"{target['num_experts']} routed + {target['num_shared']} shared",
            "max_context": str(target["max_positions"]),
        })  # fmt: skip
    table.rows += [{**row, "tag": PAPER} for row in load_paper("ecospec").table(13).rows]
    table.views.append(view_of("", table.rows, GEOMETRY_VIEW))
    return table
