"""DraftExpert's Table 4 from raw records: the cost of verification, by truncation and prefetch."""

from __future__ import annotations

from moexp import metrics
from moexp.metrics import Ratio
from moexp.tables.core.rows import of_steps, steps_of, with_ends
from moexp.tables.core.run import ArmRecords, Measured
from moexp.tables.core.table import Columns, Row, Table, paper_table, set_interval, shown, view_of
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import AR, POLICIES, settings_text, short
from moexp.tables.draftexpert.parts import add_paper, add_simulated, paper_by_platform, say_missing, simulated_rows

COLUMNS = ["target", "platform", "policy", "settings", "tag", "prompts"]
COLUMNS += [*with_ends("verify_cost", "prefetch_hit", "prefetch_waste", "stall_s", "cycle_cost", "alpha")]
COLUMNS += ["prefetch_cancelled"]

VIEW: Columns = {
    "policy": lambda row: short(row["policy"]),
    "verify_cost": shown("verify_cost", ends=True),
    "hit": "prefetch_hit",
    "waste": "prefetch_waste",
    "stall ms": shown("stall_s", 1, factor=1000),
    "cycle_cost": "cycle_cost",
}

NOTES = (
    "`verify_cost` is the time of verifying a block over that of a one-token AR step, same store, same run.",
    "Experts that arrive while drafting, prefetched or not, are not loaded by the verifier any more: prefetch "
    "moves cost out of verification, and some of it into drafting. `cycle_cost` is the whole cycle, drafting "
    "included, over the same AR step; `stall_s` (a token emitted; in ms above) counts all waiting for experts.",
    "`prefetch_hit` is used / prefetched and `prefetch_waste` 1 - hit; of the prefetched, `prefetch_cancelled` "
    "were dropped before their read began and cost no bytes.",
    "`fixed` has the paper's K = 4, the other policies the recipe's K (`settings` in the CSV).",
)


def table_4(run: Run) -> Table:
    """Verification cost over a one-token AR step, by truncation and prefetch.

    Paper: DraftExpert Table 4.
    """
    table = paper_table("draftexpert", 4, COLUMNS)
    for platform in run.platforms:
        rows = [_row(run, platform, policy) for policy, method in POLICIES.items() if method in platform.arms]
        table.rows += rows
        table.sources.append(platform)
        table.views.append(view_of(f"{platform.name} ({platform.tag})", rows, VIEW))
    add_simulated(table, _simulated(run), "policy", ["verify_cost", "prefetch_hit"])
    add_paper(table)
    keys = {"target": "target", "policy": "policy"}
    shared = {"hit": "prefetch_hit", "waste": "prefetch_waste"}
    table.views.append(paper_by_platform(table, keys, shared, "verify_cost"))
    say_missing(table, run.platforms)
    table.notes += NOTES
    return table


def _row(run: Run, platform: Measured, policy: str) -> Row:
    arms, ar = platform.arms[POLICIES[policy]], platform.arms.get(AR, {})
    row = run.head(platform) | {"policy": policy, "settings": settings_text(platform, POLICIES[policy])}
    row["prompts"] = len(arms)

    def cycle_s(arm: ArmRecords) -> Ratio:
        return metrics.pooled(Ratio(step.cycle_s, 1) for step in arm.steps)

    hit, waste, stall = metrics.prefetch_hit, metrics.prefetch_waste, metrics.stall_per_token
    row |= run.cells(arms, prefetch_hit=hit, prefetch_waste=waste, stall_s=stall, alpha=metrics.alpha)
    token_s = of_steps(metrics.token_time)
    set_interval(row, "verify_cost", run.against(arms, of_steps(metrics.verify_time), ar, token_s))
    set_interval(row, "cycle_cost", run.against(arms, cycle_s, ar, token_s))
    row["prefetch_cancelled"] = metrics.pooled(
        Ratio(step.store["cancelled"], step.store["prefetched"])
        for step in steps_of(arms)
        if "cancelled" in step.store and "prefetched" in step.store
    ).value
    return row


def _simulated(run: Run) -> list[Row]:
    """What verifying a block costs over an AR step."""
    rows = []
    for one, shared in simulated_rows(run):
        step_s = one.arms[AR].seconds / one.arms[AR].cycles
        for policy, label in POLICIES.items():
            arm = one.arms.get(label)
            if arm is None:
                continue
            counts = arm.counters
            row: Row = shared | {
                "policy": policy, "settings": arm.settings, "verify_cost": arm.verify_s / arm.cycles / step_s,
                "cycle_cost": arm.seconds / arm.cycles / step_s, "alpha": arm.alpha,
                "stall_s": counts.stall_s / arm.tokens,
            }  # fmt: skip
            if counts.prefetched:
                hit = counts.used / counts.prefetched
                row |= {"prefetch_hit": hit, "prefetch_waste": 1 - hit}
                row["prefetch_cancelled"] = counts.cancelled / counts.prefetched
            rows.append(row)
    return rows
