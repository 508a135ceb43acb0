"""EcoSpec's Tables 6, 7 and 8 from raw records: requests decoded together, by batch size."""

from __future__ import annotations

from moexp import metrics
from moexp.metrics import Ratio
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Columns, Row, Table, paper_table, view_of
from moexp.tables.ecospec.data import AR, EcoRun, batch_cycles, batch_rate
from moexp.tables.ecospec.parts import add_paper

NOTE = (
    "A batch's requests run in lockstep and load the union of their experts once; `speedup` is tokens of all "
    "requests over the seconds of the batch, against AR at the same batch size. One batch of each size: no "
    "intervals."
)


def table_6(run: EcoRun) -> Table:
    """Batch size: speed against AR at the same batch size, and the union over the batch.

    Paper: EcoSpec Table 6.
    """
    return _batches(run, 6, {"speedup": "speedup", "E": "experts_per_layer"})


def table_7(run: EcoRun) -> Table:
    """Table 6 of the paper's other target: ours is one target a recipe, so its rows are the same.

    Paper: EcoSpec Table 7.
    """
    return _batches(run, 7, {"speedup": "speedup", "E": "experts_per_layer"})


def table_8(run: EcoRun) -> Table:
    """rho: the time of an AR step over that of a verification step, by batch size.

    Paper: EcoSpec Table 8.
    """
    return _batches(run, 8, {"rho": "rho", "speedup": "speedup"})


def _batches(run: EcoRun, number: int, figures: dict[str, str]) -> Table:
    """Rows by batch size and method with some `figures` (heading -> column)."""
    columns = ["target", "method", "batch_size", "tag", "tokens_per_s", *figures.values()]
    table = paper_table("ecospec", number, columns, NOTE)
    for size, measured in sorted(run.by_batch.items()):
        table.sources.append(measured)
        for method in measured.arms:
            row = {"target": run.target.get("name"), "batch_size": size} | _row(measured, method)
            table.rows.append({name: row[name] for name in columns})
    if table.rows:
        view: Columns = {"batch": "batch_size", "method": "method", "tokens/s": "tokens_per_s", **figures}
        table.views.append(view_of(f"{run.platform} (measured), T = 0", table.rows, view))
    return add_paper(table, lambda row: row.get("workload", "Average") == "Average")


def _row(measured: Measured, method: str) -> Row:
    arms, ar = (list(measured.arms.get(name, {}).values()) for name in (method, AR))
    cycles = batch_cycles(arms)
    verify_s, ar_s = (metrics.pooled(Ratio(s.verify_s, 1) for s in steps) for steps in (cycles, batch_cycles(ar)))
    return {
        "method": method, "tag": measured.tag, "tokens_per_s": batch_rate(arms).value,
        "speedup": metrics.quotient(batch_rate(arms), batch_rate(ar)),
        "experts_per_layer": metrics.experts_per_layer(cycles).value, "rho": metrics.quotient(ar_s, verify_s),
    }  # fmt: skip
