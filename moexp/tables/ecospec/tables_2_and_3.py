"""EcoSpec's Tables 2 and 3 from raw records: bytes that a verification step reads, and where a step's time goes."""

from __future__ import annotations

from moexp import metrics
from moexp.metrics import Ratio
from moexp.sim.traffic import step_bytes
from moexp.tables.core.rows import steps_of, with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Columns, Row, Table, paper_table, shown
from moexp.tables.ecospec.data import AR, CONFIDENCE, ECOSPEC, GLOBAL, EcoRun, parts_of
from moexp.tables.ecospec.parts import NOTES, SPEEDUP, add_paper, add_run, measured_row, only

BYTES = ["target", "method", "tag", "experts_per_layer", "model_gb", "moved_gb", "read_gb"]
BYTES_VIEW: Columns = {"method": "method", "E": "experts_per_layer", "model GB": "model_gb", "moved GB": "moved_gb"}
BYTES_NOTE = (
    "`model_gb` = resident weights + MoE layers x E x bytes an expert, E measured; `moved_gb` is what the disk "
    "store read a cycle, for drafting and verification (resident weights stay in memory). The paper's "
    "`read_gb` follows from its own E by the same formula."
)

SECONDS = ("predictor_s", "draft_s", "verify_s", "step_s")
TIMES = ["target", "method", "tag", *SECONDS, "experts_per_layer", "alpha", *with_ends("speedup")]
TIMES_VIEW: Columns = {
    "method": "method", "predict s": shown("predictor_s", 3), "draft s": shown("draft_s", 3),
    "verify s": shown("verify_s", 3), "step s": shown("step_s", 3), "alpha": shown("alpha", 3), "speedup": SPEEDUP,
}  # fmt: skip


def table_2(run: EcoRun) -> Table:
    """Bytes a verification step reads: by the traffic model from E, and those that the store really moved.

    Paper: EcoSpec Table 2.
    """
    table = paper_table("ecospec", 2, BYTES, BYTES_NOTE)
    if run.greedy is not None:
        rows = [_bytes_row(run, run.greedy, method) for method in run.greedy.arms]
        add_run(table, run, run.greedy, rows, BYTES_VIEW, "")
    return add_paper(table)


def _bytes_row(run: EcoRun, measured: Measured, method: str) -> Row:
    target, steps = run.target, steps_of(measured.arms[method])
    layers, expert_bytes, resident = (float(target[key]) for key in ("moe_layers", "expert_bytes", "resident_bytes"))
    experts = metrics.experts_per_layer(steps).value
    moved = metrics.pooled(Ratio(step.store["read_bytes"], 1) for step in steps if "read_bytes" in step.store).value
    return {
        "target": target.get("name"), "method": method, "tag": measured.tag, "experts_per_layer": experts,
        "model_gb": None if experts is None else step_bytes(layers, experts, expert_bytes, resident) / 1e9,
        "moved_gb": None if moved is None else moved / 1e9,
    }  # fmt: skip


def table_3(run: EcoRun) -> Table:
    """Where a step's time goes.

    Paper: EcoSpec Table 3.
    """
    table = paper_table("ecospec", 3, TIMES, "Of AR, `step_s` is the time a token. " + NOTES[1])
    if run.greedy is not None:
        methods = [method for method in run.greedy.arms if parts_of(method)[1] in (CONFIDENCE, ECOSPEC, GLOBAL)]
        rows = [_time_row(run, run.greedy, method) for method in methods]
        add_run(table, run, run.greedy, rows, TIMES_VIEW, ", T = 0")
    return add_paper(table)


def _time_row(run: EcoRun, measured: Measured, method: str) -> Row:
    steps = steps_of(measured.arms[method])
    return only(measured_row(run, measured, method), TIMES) | {
        "predictor_s": metrics.pooled(Ratio(s.predict_s, 1) for s in steps if s.predict_s is not None).value,
        "draft_s": None if method == AR else metrics.draft_time(steps).value,
        "verify_s": None if method == AR else metrics.verify_time(steps).value,
        "step_s": metrics.pooled(Ratio(step.cycle_s, 1) for step in steps).value,
    }
