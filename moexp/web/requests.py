"""From raw records to what the page's own script shows: one row a request, and its cycles. Pure: no I/O, no torch.

Arrays in place of objects keep the file small; `columns` and `cycle_columns` say what stands where. A count that was
not taken is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from moexp import metrics
from moexp.records import StepRecord
from moexp.tables.core.run import ArmRecords
from moexp.web.sources import PAPER_NAMES, Source

Record = TypeVar("Record")


class Column(NamedTuple, Generic[Record]):
    """One column of the table. `kind` says how the script shows a value: text, int, num, mb (of bytes) or share."""

    key: str
    label: str
    kind: str
    value: Callable[[Record], Any]


class Request(NamedTuple):
    """What one method did with one prompt, and the part of a run folder that it is from."""

    source: Source
    arm: ArmRecords

    @property
    def name(self) -> str:
        """The prompt's name in its settings, or the request's number where it has none there."""
        names, request = self.source.measured.settings.get("prompts", ()), self.arm.request.request
        return str(names[request]) if 0 <= request < len(names) else str(request)

    @property
    def bytes_per_token(self) -> float | None:
        """None in a batch: its bytes belong to all of its requests."""
        if any(step.batch is not None and step.batch > 1 for step in self.arm.steps):
            return None
        return _rounded(metrics.bytes_per_token(self.arm.steps))


def _rounded(ratio: metrics.Ratio) -> float | None:
    return None if ratio.value is None else float(f"{ratio.value:.5g}")


COLUMNS: tuple[Column[Request], ...] = (
    Column("method", "method", "text", lambda one: one.arm.request.method),
    Column("request", "request", "text", lambda one: one.name),
    Column("workload", "workload", "text", lambda one: one.arm.request.workload),
    Column("platform", "platform", "text", lambda one: one.source.platform),
    Column("run", "run", "text", lambda one: one.source.run),
    Column("tag", "tag", "text", lambda one: one.source.measured.tag),
    Column("tokens", "tokens", "int", lambda one: one.arm.request.new_tokens),
    Column("tokens_per_s", "tokens/s", "num", lambda one: _rounded(metrics.tokens_per_s([one.arm.request]))),
    Column("alpha", "alpha", "num", lambda one: _rounded(metrics.alpha(one.arm.steps))),
    Column("acceptance", "acceptance", "num", lambda one: _rounded(metrics.acceptance(one.arm.steps))),
    Column("bytes_per_token", "MB/token", "mb", lambda one: one.bytes_per_token),
    Column("stall_share", "stall share", "share", lambda one: _rounded(metrics.stall_share(one.arm.steps))),
    Column("paper", "paper", "text", lambda one: PAPER_NAMES[one.source.paper]),
)


def _count(name: str) -> Callable[[StepRecord], int | None]:
    return lambda step: round(step.store[name]) if name in step.store else None


def _stall_ms(*names: str) -> Callable[[StepRecord], float | None]:
    """Milliseconds of these stalls together, those that the store counted."""

    def value(step: StepRecord) -> float | None:
        known = [step.store[name] for name in names if name in step.store]
        return _ms(sum(known)) if known else None

    return value


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


CYCLE_COLUMNS: tuple[Column[StepRecord], ...] = (
    Column("drafted", "drafted", "int", lambda step: step.drafted),
    Column("accepted", "accepted", "int", lambda step: step.accepted),
    Column("emitted", "emitted", "int", lambda step: step.emitted),
    Column("unique_draft", "experts, draft", "int", lambda step: step.unique_draft),
    Column("unique_verify", "experts, verify", "int", lambda step: step.unique_verify),
    Column("missed", "loaded on demand", "int", _count("missed")),
    Column("prefetched", "prefetched", "int", _count("prefetched")),
    Column("read_bytes", "MB read", "mb", _count("read_bytes")),
    Column("stall_ms", "stalled ms", "num", _stall_ms("stall_s")),
    Column("draft_ms", "draft ms", "num", lambda step: _ms(step.draft_s)),
    Column("draft_wait_ms", "of it waiting", "num", _stall_ms("draft_stall_s")),
    Column("predict_ms", "predict ms", "num", lambda step: _ms(step.predict_s)),
    Column("verify_ms", "verify ms", "num", lambda step: _ms(step.verify_s)),
    Column("verify_wait_ms", "of it waiting", "num", _stall_ms("verify_stall_s", "ar_stall_s")),
    Column("cycle_ms", "cycle ms", "num", lambda step: _ms(step.cycle_s)),
)


def explorer_data(sources: Sequence[Source]) -> dict[str, Any]:
    """`{columns, rows, cycle_columns, cycles}`; `cycles[n]` are those of `rows[n]`."""
    requests = [
        Request(source, arm) for source in sources for arms in source.measured.arms.values() for arm in arms.values()
    ]
    return {
        "columns": [column[:3] for column in COLUMNS],
        "rows": [[column.value(request) for column in COLUMNS] for request in requests],
        "cycle_columns": [column[:3] for column in CYCLE_COLUMNS],
        "cycles": [[[c.value(step) for c in CYCLE_COLUMNS] for step in one.arm.steps] for one in requests],
    }
