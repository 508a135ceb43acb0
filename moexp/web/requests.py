"""From raw records to what the page's own script shows: one row a request, and its cycles. Pure: no I/O, no torch.

Arrays in place of objects keep the file small; `columns` and `cycle_columns` say what stands where. A count that was
not taken is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moexp import metrics
from moexp.records import StepRecord
from moexp.tables.core.run import ArmRecords, Measured
from moexp.web.sources import PAPER_NAMES, Source


class Column(NamedTuple):
    """One column of the table. `kind` says how the script shows a value: text, int, num, mb (of bytes) or share."""

    key: str
    label: str
    kind: str


COLUMNS = (
    Column("method", "method", "text"),
    Column("request", "request", "text"),
    Column("workload", "workload", "text"),
    Column("platform", "platform", "text"),
    Column("run", "run", "text"),
    Column("tag", "tag", "text"),
    Column("tokens", "tokens", "int"),
    Column("tokens_per_s", "tokens/s", "num"),
    Column("alpha", "alpha", "num"),
    Column("acceptance", "acceptance", "num"),
    Column("bytes_per_token", "MB/token", "mb"),
    Column("stall_share", "stall share", "share"),
    Column("paper", "paper", "text"),
)

CYCLE_COLUMNS = (
    Column("drafted", "drafted", "int"),
    Column("accepted", "accepted", "int"),
    Column("emitted", "emitted", "int"),
    Column("unique_draft", "experts, draft", "int"),
    Column("unique_verify", "experts, verify", "int"),
    Column("missed", "loaded on demand", "int"),
    Column("prefetched", "prefetched", "int"),
    Column("read_bytes", "MB read", "mb"),
    Column("stall_ms", "stalled ms", "num"),
    Column("draft_ms", "draft ms", "num"),
    Column("draft_wait_ms", "of it waiting", "num"),
    Column("predict_ms", "predict ms", "num"),
    Column("verify_ms", "verify ms", "num"),
    Column("verify_wait_ms", "of it waiting", "num"),
    Column("cycle_ms", "cycle ms", "num"),
)


def explorer_data(sources: Sequence[Source]) -> dict[str, Any]:
    """`{columns, rows, cycle_columns, cycles}`; `cycles[n]` are those of `rows[n]`."""
    rows, cycles = [], []
    for source in sources:
        for arms in source.measured.arms.values():
            for arm in arms.values():
                values = request_values(source, arm)
                rows.append([values[column.key] for column in COLUMNS])
                cycles.append([list(cycle_values(step).values()) for step in arm.steps])
    return {
        "columns": [list(column) for column in COLUMNS],
        "rows": rows,
        "cycle_columns": [list(column) for column in CYCLE_COLUMNS],
        "cycles": cycles,
    }


def request_values(source: Source, arm: ArmRecords) -> dict[str, Any]:
    """One row, by column. In a batch, bytes belong to all of its requests, so a request has none of its own."""
    request, steps = arm.request, arm.steps
    batched = any(step.batch is not None and step.batch > 1 for step in steps)
    return {
        "method": request.method,
        "request": prompt_name(source.measured, request.request),
        "workload": request.workload,
        "platform": source.platform,
        "run": source.run,
        "tag": source.measured.tag,
        "tokens": request.new_tokens,
        "tokens_per_s": _rounded(metrics.tokens_per_s([request])),
        "alpha": _rounded(metrics.alpha(steps)),
        "acceptance": _rounded(metrics.acceptance(steps)),
        "bytes_per_token": None if batched else _rounded(metrics.bytes_per_token(steps)),
        "stall_share": _rounded(metrics.stall_share(steps)),
        "paper": PAPER_NAMES[source.paper],
    }


def cycle_values(step: StepRecord) -> dict[str, int | float | None]:
    """One cycle, by column: what the record says, seconds as milliseconds to a hundredth."""
    store = step.store
    waits = [store[name] for name in ("verify_stall_s", "ar_stall_s") if name in store]
    return {
        "drafted": step.drafted,
        "accepted": step.accepted,
        "emitted": step.emitted,
        "unique_draft": step.unique_draft,
        "unique_verify": step.unique_verify,
        "missed": _count(store.get("missed")),
        "prefetched": _count(store.get("prefetched")),
        "read_bytes": _count(store.get("read_bytes")),
        "stall_ms": _ms(store.get("stall_s")),
        "draft_ms": _ms(step.draft_s),
        "draft_wait_ms": _ms(store.get("draft_stall_s")),
        "predict_ms": _ms(step.predict_s),
        "verify_ms": _ms(step.verify_s),
        "verify_wait_ms": _ms(sum(waits)) if waits else None,
        "cycle_ms": _ms(step.cycle_s),
    }


def prompt_name(measured: Measured, request: int) -> str:
    """A prompt's name in its settings, or the request's number where it has none there."""
    names = measured.settings.get("prompts", ())
    return str(names[request]) if 0 <= request < len(names) else str(request)


def _rounded(ratio: metrics.Ratio) -> float | None:
    return None if ratio.value is None else float(f"{ratio.value:.5g}")


def _count(value: float | None) -> int | None:
    return None if value is None else round(value)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
