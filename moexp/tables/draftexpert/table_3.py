"""DraftExpert's Table 3 from raw records: what drafting touches, how much of it is accepted, and what it costs."""

from __future__ import annotations

from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Columns, Row, Table, View, paper_table, set_interval, shown, text_of, view_of
from moexp.tables.draftexpert.data import Run, draft_cost, draft_counts
from moexp.tables.draftexpert.labels import DRAFT_TOKENS, DRAFTERS, RESIDENT, TOP_R
from moexp.tables.draftexpert.parts import add_paper, add_simulated, paper_by_platform, say_missing, simulated_rows

COLUMNS = ["target", "platform", "drafter", "tag", "prompts", "blocks"]
COLUMNS += [*with_ends("unique_draft", "acceptance", "acceptance_ctx", "cost"), "repeated_ngrams"]

NOTES = (
    f"K = {DRAFT_TOKENS} in every block, no truncation, no prefetch. `unique_draft` (the union of routed "
    "layer-experts that drafting a block touched) and `acceptance` are counted over whole blocks of real greedy "
    "decoding with every expert resident; the last, shorter blocks of a text are left out.",
    "`acceptance_ctx` is the same ratio with every block started from held-out text, the target's keys and values "
    "before it; its interval is over held-out rows.",
    "`cost` is `draft_s` a drafted token over that of top-1 on the same store in the same run.",
)


def table_3(run: Run) -> Table:
    """Draft side at K = 4: unique experts, acceptance, and cost by platform.

    Paper: DraftExpert Table 3.
    """
    table = paper_table("draftexpert", 3, COLUMNS)
    table.sources = [platform for platform in (run.resident, *run.platforms) if platform is not None]
    counts = {drafter: draft_counts(run, drafter, method) for drafter, method in DRAFTERS.items()}
    table.rows = _rows(run, table, counts)
    if table.sources:
        table.views += _views(run, table, counts)
    add_simulated(table, _simulated(run, counts), "drafter", ["unique_draft", "acceptance", "cost"])
    add_paper(table)
    keys = {"target": "target", "drafter": "drafter"}
    shared = {"unique": "unique_draft", "acceptance": "acceptance"}
    table.views.append(paper_by_platform(table, keys, shared, "cost"))
    say_missing(table, table.sources)
    table.notes += NOTES
    repeats = next((row["repeated_ngrams"] for row in counts.values() if row["repeated_ngrams"] is not None), None)
    if repeats is not None:
        table.notes.append(
            f"Greedy text of a small model loops, and loops are easy to draft: {100 * float(repeats):.0f}% of the "
            "4-grams of the decoded text had occurred before in the same answer."
        )
    return table


def _rows(run: Run, table: Table, counts: dict[str, Row]) -> list[Row]:
    """One a drafter and platform, where either was measured."""
    rows = []
    for drafter, method in DRAFTERS.items():
        for platform in table.sources:
            if method in platform.arms or counts[drafter]["acceptance_ctx"] is not None:
                row = run.head(platform) | {"drafter": drafter} | counts[drafter]
                arms, base = (platform.arms.get(name, {}) for name in (method, TOP_R[1]))
                set_interval(row, "cost", run.against(arms, draft_cost, base, draft_cost))
                rows.append(row)
    return rows


def _views(run: Run, table: Table, counts: dict[str, Row]) -> list[View]:
    columns: Columns = {
        "drafter": "drafter", "unique_draft": shown("unique_draft", 0, ends=True),
        "acceptance": shown("acceptance", 3, ends=True), "acceptance_ctx": shown("acceptance_ctx", 3, ends=True),
    }  # fmt: skip
    named = [{"drafter": drafter, **row} for drafter, row in counts.items()]
    names = [platform.name for platform in run.platforms] or [RESIDENT]
    costs = {(row["drafter"], row["platform"]): text_of(row, "cost") for row in table.rows}
    drafters = dict.fromkeys(str(row["drafter"]) for row in table.rows)
    lines = [[drafter, *(costs.get((drafter, name), "-") for name in names)] for drafter in drafters]
    return [
        view_of("Counts (do not depend on the platform)", named, columns),
        View("Cost of a drafted token over that of top-1", ["drafter", *names], lines),
    ]


def _simulated(run: Run, counts: dict[str, Row]) -> list[Row]:
    """What drafting a token costs over top-1."""
    rows = []
    for one, shared in simulated_rows(run):
        base = one.arms.get(TOP_R[1])
        for drafter, label in DRAFTERS.items():
            arm = one.arms.get(label)
            if arm is not None and base is not None and arm.full_blocks and base.full_draft_s:
                cost = (arm.full_draft_s / arm.full_blocks) / (base.full_draft_s / base.full_blocks)
                rows.append(shared | counts[drafter] | {"drafter": drafter, "cost": cost})
    return rows
