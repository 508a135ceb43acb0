"""DraftExpert's tables 3, 5 and 6 from raw records: the drafter, its training, and where the paper stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moexp import metrics
from moexp.metrics import Interval, Ratio
from moexp.papers import Paper
from moexp.tables.core.rows import with_ends
from moexp.tables.core.run import ArmRecords
from moexp.tables.core.table import Row, Table, View, set_interval, text, text_of
from moexp.tables.core.tags import PAPER
from moexp.tables.draftexpert.data import Run, acceptance_ctx, add_paper, paper_by_platform, paper_view, say_missing
from moexp.tables.draftexpert.labels import DRAFT_TOKENS, FIXED, RESIDENT, TOP_R
from moexp.tables.draftexpert.simulated import NOTE, beside_paper, draft_rows


def table_3(run: Run, paper: Paper) -> Table:
    """Draft side at K = 4: unique experts, acceptance, and cost by platform."""
    table = Table(
        3,
        paper.table(3).title,
        ["target", "platform", "drafter", "tag", "prompts", "blocks"]
        + with_ends("unique_draft", "acceptance", "acceptance_ctx", "cost")
        + ["repeated_ngrams"],
    )
    timed = [platform for platform in (run.resident, *run.platforms) if platform is not None]
    drafters = {name: name for name in TOP_R.values()} | {"draft-expert": FIXED}
    cost_rows: dict[str, dict[str, Row]] = {name: {} for name in drafters}
    counts: dict[str, Row] = {}
    for drafter, method in drafters.items():
        counts[drafter] = draft_counts(run, drafter, method)
        for platform in timed:
            if method not in platform.arms and counts[drafter]["acceptance_ctx"] is None:
                continue
            base = platform.arms.get(TOP_R[1], {})
            row: Row = {
                "target": run.target["name"], "platform": platform.name, "drafter": drafter, "tag": platform.tag,
                **counts[drafter],
            }  # fmt: skip
            set_interval(row, "cost", run.against(platform.arms.get(method, {}), draft_cost, base, draft_cost))
            cost_rows[drafter][platform.name] = row
            table.rows.append(row)
    table.sources += timed
    names = [platform.name for platform in timed if platform is not run.resident] or [RESIDENT]
    if timed:
        table.views += [
            View(
                "Counts (do not depend on the platform)",
                ["drafter", "unique_draft", "acceptance", "acceptance_ctx"],
                [
                    [d, text_of(r, "unique_draft", 0), text_of(r, "acceptance", 3), text_of(r, "acceptance_ctx", 3)]
                    for d, r in counts.items()
                ],
            ),
            View(
                "Cost of a drafted token over that of top-1",
                ["drafter", *names],
                [
                    [d, *(text_of(rows[name], "cost") if name in rows else "-" for name in names)]
                    for d, rows in cost_rows.items()
                    if rows
                ],
            ),
        ]
    simulated = draft_rows(run, counts)
    if simulated:
        table.rows += simulated
        table.views.append(beside_paper(3, simulated, ["unique_draft", "acceptance", "cost"]))
        table.notes.append(NOTE)
    add_paper(table, paper)
    header = ["target", "drafter", "unique", "acceptance"]
    table.views.append(paper_by_platform(table, ["target", "drafter"], ["unique_draft", "acceptance"], "cost", header))
    say_missing(table, timed)
    repeats = next((row["repeated_ngrams"] for row in counts.values() if row["repeated_ngrams"] is not None), None)
    table.notes += [
        f"K = {DRAFT_TOKENS} in every block, no truncation, no prefetch. `unique_draft` (the union of routed "
        "layer-experts that drafting a block touched) and `acceptance` are counted over whole blocks of real greedy "
        "decoding with every expert resident; the last, shorter blocks of a text are left out.",
        "`acceptance_ctx` is the same ratio with every block started from held-out text, the target's keys and values "
        "before it; its interval is over held-out rows.",
        "`cost` is `draft_s` a drafted token over that of top-1 on the same store in the same run.",
    ]
    if repeats is not None:
        table.notes.append(
            f"Greedy text of a small model loops, and loops are easy to draft: {100 * float(repeats):.0f}% of the "
            "4-grams of the decoded text had occurred before in the same answer."
        )
    return table


def draft_counts(run: Run, drafter: str, method: str) -> Row:
    """Counts of one drafter, from the resident run and from the draft experts' own measurement."""
    row: Row = {"prompts": None, "blocks": None, "repeated_ngrams": None}
    arms = run.resident.arms.get(method, {}) if run.resident is not None else {}
    whole = {n: [step for step in arm.steps if step.drafted == DRAFT_TOKENS] for n, arm in arms.items()}

    def over(of: Callable[[list[Any]], Ratio]) -> Interval | None:
        return metrics.bootstrap([of(steps) for steps in whole.values()], samples=run.samples) if whole else None

    set_interval(row, "unique_draft", over(metrics.unique_draft))
    set_interval(row, "acceptance", over(metrics.acceptance))
    set_interval(row, "acceptance_ctx", acceptance_ctx(run, run.draft.get(drafter)))
    if whole:
        row["prompts"], row["blocks"] = len(whole), sum(map(len, whole.values()))
        row["repeated_ngrams"] = metrics.repeated_ngrams(arm.request.tokens for arm in arms.values()).value
    return row


def draft_cost(arm: ArmRecords) -> Ratio:
    """Seconds of drafting a drafted token, over whole blocks."""
    whole = [step for step in arm.steps if step.drafted == DRAFT_TOKENS]
    return metrics.pooled(Ratio(step.draft_s, step.drafted) for step in whole)


def table_5(run: Run, paper: Paper) -> Table:
    """What each term of the training objective adds."""
    table = Table(
        5,
        paper.table(5).title,
        ["target", "loss", "tag", "steps", "kl", "agreement", "router_agreement"]
        + with_ends("acceptance_ctx", "prefetch_hit"),
    )
    for kept in run.ablation.settings["rows"] if run.ablation is not None else ():
        measured = kept["metrics"]
        row: Row = {
            "target": run.target["name"], "loss": kept["loss"], "tag": "measured", "steps": kept.get("steps"),
            **{name: measured.get(name) for name in ("kl", "agreement", "router_agreement")},
        }  # fmt: skip
        set_interval(row, "acceptance_ctx", acceptance_ctx(run, measured))
        arms = run.ablation.arms.get(kept["loss"], {}) if run.ablation is not None else {}
        hit = run.over(arms.values(), lambda arm: metrics.prefetch_hit(arm.steps)) if arms else None
        set_interval(row, "prefetch_hit", hit)
        table.rows.append(row)
    if table.rows:
        names = ["kl", "agreement", "router_agreement"]
        table.views.append(
            View(
                "",
                ["loss", "KL", "agree", "router", "acceptance_ctx", "hit"],
                [
                    [
                        str(r["loss"]),
                        *(text(r[n]) for n in names),
                        text_of(r, "acceptance_ctx"),
                        text(r["prefetch_hit"]),
                    ]
                    for r in table.rows
                ],
            )
        )
    if run.ablation is not None:
        table.sources.append(run.ablation)
    add_paper(table, paper)
    keys = ["target", "loss", "kl", "agreement", "router_agreement", "prefetch_hit"]
    table.views.append(paper_view(table, ["target", "loss", "KL", "agree", "router", "hit"], keys))
    say_missing(table, table.sources)
    table.notes += [
        "Losses are added row by row; every trained row starts from the same residual warm-up and takes the same "
        "number of end-to-end steps (`steps`), fewer than the recipe's own draft experts had.",
        "KL (nats), `agreement` and `router_agreement` are teacher-forced on held-out rows. The paper heads agreement "
        "`Acc.`; `acceptance_ctx` is acceptance of blocks of 4 started from held-out text.",
        "`prefetch_hit` is from decoding with prefetch and the recipe's truncation over an unpaced host store.",
    ]
    trained = run.draft.get("draft-expert")
    if trained:
        table.notes.append(
            "The recipe's own draft experts, fully trained: "
            f"KL {trained['kl']:.2f}, agreement {trained['agreement']:.2f}, "
            f"router_agreement {trained['router_agreement']:.2f}, "
            f"acceptance_ctx {trained['acceptance']:.2f} (measured)."
        )
    return table


IMPLEMENTED = {
    "Standard SD": "no: every drafter here is the target itself",
    "MoE-SD / MoE-Spec": "budgets only, as the B of confidence-expansion",
    "S-MoE / SpecMoE": "drafter: top-r (r = 1 to k)",
    "Offload systems": "store: host or disk; cache policies; prefetch",
    "Dynamic control": "policy: confidence",
    "DraftExpert": "draft-expert, confidence-expansion, prefetch",
}


def table_6(run: Run, paper: Paper) -> Table:
    """Positioning (qualitative): the paper's text, and what of it runs here."""
    table = Table(6, paper.table(6).title, ["family", "idea", "difference", "moexp", "tag"])
    table.rows = [{**row, "moexp": IMPLEMENTED.get(row["family"], "no"), "tag": PAPER} for row in paper.table(6).rows]
    table.views = [
        View(title, ["family", column], [[str(row["family"]), str(row[column])] for row in table.rows])
        for column, title in (("idea", ""), ("difference", ""), ("moexp", "What of it runs in moexp"))
    ]
    table.notes = [
        "Qualitative: nothing here is measured. The last column is about this project, the others are the paper's."
    ]
    return table
