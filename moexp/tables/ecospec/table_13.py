"""EcoSpec's Table 13: the targets' geometry."""

from __future__ import annotations

from moexp.papers import Paper
from moexp.tables.core.table import Table, paper_table, view_of
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.ecospec.data import EcoRun

COLUMNS = ["target", "tag", "blocks", "moe_layers", "dense_layers", "experts", "top_k", "max_context", "total_active"]
VIEW = {"target": "target", "blocks": "blocks", "MoE layers": "moe_layers", "experts": "experts", "top-k": "top_k"}


def table_13(run: EcoRun, paper: Paper) -> Table:
    """The paper's targets, and ours where anything is measured on it.

    Paper: EcoSpec Table 13.
    """
    table = paper_table(paper, 13, COLUMNS)
    target = run.target
    if target:
        table.rows.append({
            "target": target["name"], "tag": MEASURED, "blocks": target["layers"], "moe_layers": target["moe_layers"],
            "dense_layers": target["layers"] - target["moe_layers"], "top_k": target["top_k"],
            "experts": f"{target['num_experts']} routed + {target['num_shared']} shared",
            "max_context": str(target["max_positions"]),
        })  # fmt: skip
    table.rows += [{**row, "tag": PAPER} for row in paper.table(13).rows]
    table.views.append(view_of("", table.rows, VIEW))
    return table
