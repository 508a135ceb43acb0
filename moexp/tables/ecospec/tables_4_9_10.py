"""EcoSpec's Tables 4, 9 and 10 from raw records: selections of the same trees, and what the predictor is worth."""

from __future__ import annotations

from moexp import metrics
from moexp.tables.core.rows import steps_of, with_ends
from moexp.tables.core.table import Columns, Row, Table, paper_table, shown
from moexp.tables.ecospec.data import CHEAPEST, CONFIDENCE, ECOSPEC, EPSILON, GLOBAL, ORACLE, EcoRun, parts_of
from moexp.tables.ecospec.parts import FIGURES, MEASURED_COLUMNS, NOTES, add_paper, add_run, measured_row, only

FIGURE_COLUMNS = with_ends(*MEASURED_COLUMNS)
NO_SPEED: Row = dict.fromkeys(with_ends("speedup"))
"""Of selections whose expert sets come from running the target: no method, and no speed."""


def table_4(run: EcoRun) -> Table:
    """Static global cost against marginal cost, of the same trees.

    Paper: EcoSpec Table 4.
    """
    epsilon = run.target.get("epsilon")
    table = _selections(run, 4, (CONFIDENCE, GLOBAL, ECOSPEC, EPSILON), "strategy")
    table.notes.append(f"`EcoSpec` takes epsilon {epsilon} in P / (cost + epsilon), `epsilon x` the value x.")
    return table


def table_10(run: EcoRun) -> Table:
    """The target's own expert sets against the learned predictor's, under the same rule.

    Paper: EcoSpec Table 10.
    """
    table = _selections(run, 10, (CONFIDENCE, ORACLE, ECOSPEC, CHEAPEST), "predictor")
    table.notes.append(
        "`oracle` picks by the target's own routing; `cheapest` takes, of all prefix-closed choices of as many nodes, "
        "the one with the fewest experts by that routing, whatever its probability: no selection from these trees "
        "has a lower E."
    )
    return table


def _selections(run: EcoRun, number: int, strategies: tuple[str, ...], key: str) -> Table:
    """Methods with these selections, of the drafters that have others to compare with; `key` names the selection."""
    columns = ["target", "method", key, "tag", "uniform", "verify_s", *FIGURE_COLUMNS]
    table = paper_table("ecospec", number, columns, NOTES[0])
    if run.greedy is not None:
        rows = []
        parts = {method: parts_of(method) for method in run.greedy.arms}
        compared = {drafter for drafter, strategy in parts.values() if strategy in (GLOBAL, ORACLE)}
        for method, (drafter, strategy) in parts.items():
            named = EPSILON if strategy.split()[0] == EPSILON else strategy
            if drafter in compared and named in strategies:
                row = only(measured_row(run, run.greedy, method), columns) | {key: strategy}
                row["verify_s"] = metrics.verify_time(steps_of(run.greedy.arms[method])).value
                rows.append(row | NO_SPEED if strategy in (ORACLE, CHEAPEST) else row)
        view: Columns = {"method": "method", **FIGURES, "verify s": shown("verify_s", 3)}
        add_run(table, run, run.greedy, rows, view, ", T = 0")
    return add_paper(table)


def table_9(run: EcoRun) -> Table:
    """How much the predictor's accuracy matters: checkpoints on the way, the last, and the oracle.

    Paper: EcoSpec Table 9.
    """
    columns = ["target", "method", "predictor", "overlap", "tag", "uniform", *FIGURE_COLUMNS]
    note = "`overlap` is the mean top-k overlap of predicted and routed experts over verified nodes."
    table = paper_table("ecospec", 9, columns, note, NOTES[0])
    if run.greedy is not None:
        rows = []
        parts = {method: parts_of(method) for method in run.greedy.arms}
        swept = {drafter for drafter, strategy in parts.values() if strategy == ORACLE}
        for method, (drafter, strategy) in parts.items():
            if drafter in swept and strategy.startswith((ECOSPEC, ORACLE)):
                row = only(measured_row(run, run.greedy, method), columns)
                row["predictor"] = strategy.removeprefix(ECOSPEC).strip() or "converged"
                row["overlap"] = metrics.router_agreement(steps_of(run.greedy.arms[method])).value
                rows.append(row | NO_SPEED if strategy == ORACLE else row)
        view: Columns = {"predictor": "predictor", "overlap": "overlap", **FIGURES}
        add_run(table, run, run.greedy, rows, view, ", T = 0")
    return add_paper(table)
