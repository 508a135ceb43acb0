"""DraftExpert's Table 6: where the paper stands, and what of it runs here."""

from __future__ import annotations

from moexp.papers import load_paper
from moexp.tables.core.table import Table, paper_table, view_of
from moexp.tables.core.tags import PAPER
from moexp.tables.draftexpert.data import Run

IMPLEMENTED = {
    "Standard SD": "no: every drafter here is the target itself",
    "MoE-SD / MoE-Spec": "budgets only, as the B of confidence-expansion",
    "S-MoE / SpecMoE": "drafter: top-r (r = 1 to k)",
    "Offload systems": "store: host or disk; cache policies; prefetch",
    "Dynamic control": "policy: confidence",
    "DraftExpert": "draft-expert, confidence-expansion, prefetch",
}


def table_6(run: Run) -> Table:
    """Positioning (qualitative): the paper's text, and what of it runs here.

    Paper: DraftExpert Table 6.
    """
    note = "Qualitative: nothing here is measured. The last column is about this project, the others are the paper's."
    table = paper_table("draftexpert", 6, ["family", "idea", "difference", "moexp", "tag"], note)
    table.rows = [
        {**row, "moexp": IMPLEMENTED.get(row["family"], "no"), "tag": PAPER}
        for row in load_paper("draftexpert").table(6).rows
    ]
    for column, title in (("idea", ""), ("difference", ""), ("moexp", "What of it runs in moexp")):
        table.views.append(view_of(title, table.rows, {"family": "family", column: column}))
    return table
