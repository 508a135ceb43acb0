"""DraftExpert's Table 5 from raw records: what each term of the training objective adds."""

from __future__ import annotations

from moexp import metrics
from moexp.tables.core.rows import with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Columns, Row, Table, paper_table, set_interval, shown, view_of
from moexp.tables.core.tags import MEASURED
from moexp.tables.draftexpert.data import Run, acceptance_ctx
from moexp.tables.draftexpert.parts import add_paper, paper_view, say_missing

COLUMNS = ["target", "loss", "tag", "steps", "kl", "agreement", "router_agreement"]
COLUMNS += with_ends("acceptance_ctx", "prefetch_hit")
TEACHER_FORCED = {"KL": "kl", "agree": "agreement", "router": "router_agreement"}
VIEW: Columns = {
    "loss": "loss", **TEACHER_FORCED, "acceptance_ctx": shown("acceptance_ctx", ends=True), "hit": "prefetch_hit",
}  # fmt: skip

NOTES = (
    "Losses are added row by row; every trained row starts from the same residual warm-up and takes the same "
    "number of end-to-end steps (`steps`), fewer than the recipe's own draft experts had.",
    "KL (nats), `agreement` and `router_agreement` are teacher-forced on held-out rows. The paper heads agreement "
    "`Acc.`; `acceptance_ctx` is acceptance of blocks of 4 started from held-out text.",
    "`prefetch_hit` is from decoding with prefetch and the recipe's truncation over an unpaced host store.",
)


def table_5(run: Run) -> Table:
    """What each term of the training objective adds.

    Paper: DraftExpert Table 5.
    """
    table = paper_table("draftexpert", 5, COLUMNS)
    if run.ablation is not None:
        table.sources.append(run.ablation)
        table.rows = _rows(run, run.ablation)
        table.views.append(view_of("", table.rows, VIEW))
    add_paper(table)
    columns = {"target": "target", "loss": "loss", **TEACHER_FORCED, "hit": "prefetch_hit"}
    table.views.append(paper_view(table, columns))
    say_missing(table, table.sources)
    table.notes += NOTES
    trained = run.draft.get("draft-expert")
    if trained:
        table.notes.append(
            "The recipe's own draft experts, fully trained: "
            f"KL {trained['kl']:.2f}, agreement {trained['agreement']:.2f}, "
            f"router_agreement {trained['router_agreement']:.2f}, "
            f"acceptance_ctx {trained['acceptance']:.2f} (measured)."
        )
    return table


def _rows(run: Run, ablation: Measured) -> list[Row]:
    rows: list[Row] = []
    for trained in ablation.settings["rows"]:
        held_out, arms = trained["metrics"], ablation.arms.get(trained["loss"], {})
        row: Row = {
            "target": run.target["name"], "loss": trained["loss"], "tag": MEASURED, "steps": trained.get("steps"),
            **{name: held_out.get(name) for name in TEACHER_FORCED.values()},
        }  # fmt: skip
        set_interval(row, "acceptance_ctx", acceptance_ctx(run, held_out))
        rows.append(row | run.cells(arms, prefetch_hit=metrics.prefetch_hit))
    return rows
