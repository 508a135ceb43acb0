"""EcoSpec's Tables 5, 11 and 12 from raw records: a drafter trained for its trees (GTO), and the budget gamma."""

from __future__ import annotations

from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Columns, Table, paper_table, view_of
from moexp.tables.ecospec.data import AR, CONFIDENCE, ECOSPEC, GTO, EcoRun, parts_of
from moexp.tables.ecospec.parts import (
    AVERAGE,
    FIGURES,
    MEASURED_COLUMNS,
    NOTES,
    add_paper,
    add_run,
    measured_row,
    workloads_of,
)

COLUMNS = ["temperature", "workload", "prompts", "tag", "uniform", *with_ends(*MEASURED_COLUMNS)]


def table_5(run: EcoRun) -> Table:
    """A drafter trained for its trees (GTO), without and with selection by marginal cost.

    Paper: EcoSpec Table 5.
    """
    table = paper_table("ecospec", 5, ["target", "method", *COLUMNS], *NOTES)
    measured = run.greedy
    if measured is not None and GTO in measured.arms:
        methods = [name for name in measured.arms if parts_of(name) in ((GTO, CONFIDENCE), (GTO, ECOSPEC))]
        workloads = [*workloads_of(measured), AVERAGE]
        rows = [measured_row(run, measured, method, workload) for method in methods for workload in workloads]
        add_run(table, run, measured, rows, {"method": "method", "workload": "workload", **FIGURES}, ", T = 0")
    return add_paper(table)


def table_11(run: EcoRun) -> Table:
    """The verification budget gamma.

    Paper: EcoSpec Table 11.
    """
    return _budgets(run, 11, [AVERAGE])


def table_12(run: EcoRun) -> Table:
    """Table 11 of the paper's other target; here by workload.

    Paper: EcoSpec Table 12.
    """
    return _budgets(run, 12, [] if run.greedy is None else workloads_of(run.greedy))


def _budgets(run: EcoRun, number: int, workloads: list[str]) -> Table:
    """Methods that were measured with other budgets than the main run's."""
    table = paper_table("ecospec", number, ["target", "method", "budget", *COLUMNS], *NOTES)
    others = [measured for gamma, measured in run.by_gamma.items() if gamma != run.target.get("gamma")]
    swept = {method for measured in others for method in measured.arms} - {AR}
    for gamma, measured in sorted(run.by_gamma.items()):
        table.sources.append(measured)
        for method in measured.arms:
            if method in swept:
                rows = [measured_row(run, measured, method, workload) for workload in workloads]
                table.rows += [row | {"budget": gamma} for row in rows]
    if table.rows:
        view: Columns = {"gamma": "budget", "workload": "workload", "method": "method", **FIGURES}
        table.views.append(view_of(f"{run.platform} (measured), T = 0", table.rows, view))
    return add_paper(table, lambda row: row["workload"] == "Average")
