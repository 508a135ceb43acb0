"""Raw records of runs, one JSON object a line. Tables are derived from these, never the other way round.

A count that was not taken is None (null in the file), never 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from moexp.base import atomic
from moexp.base.errors import MoexpError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decoding cycle: propose, predict, select, prefetch, verify, commit. For AR, one token.

    request: index of the request in its run. drafted, accepted: tokens proposed to the verifier, and of
    them accepted. emitted: tokens that the cycle added, bonus included; `tokens` are their ids.
    confidences: of the drafted tokens. unique_draft, unique_verify: layer-experts in the union over the
    cycle's block; union_layers: MoE layers that the latter sums over. router_overlap, router_slots: experts
    that draft-path and target routing have in common over the verified rows and layers, out of so many.
    tree_nodes: nodes of the draft tree that the verified ones were selected from, the pending token included.
    batch: requests verified in the same step, whose times, counters and unique_verify are then the batch's.
    Times in seconds; predict_s, which draft_s leaves out, is that of an expert predictor of its own. store: how
    much each of the store's counters grew in this cycle.
    """

    request: int
    cycle: int
    method: str
    drafted: int
    accepted: int
    emitted: int
    tokens: list[int]
    draft_s: float
    verify_s: float
    cycle_s: float
    confidences: list[float] = field(default_factory=list)
    unique_draft: int | None = None
    unique_verify: int | None = None
    union_layers: int | None = None
    router_overlap: int | None = None
    router_slots: int | None = None
    tree_nodes: int | None = None
    batch: int | None = None
    predict_s: float | None = None
    store: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Tokens are counted by ids, so the two must not come apart; and nothing undrafted can be accepted.
        assert self.emitted == len(self.tokens), (self.emitted, self.tokens)
        assert 0 <= self.accepted <= self.drafted, (self.accepted, self.drafted)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One prompt decoded by one method. `tokens` are the new ids; `decode_s` leaves the prefill out."""

    request: int
    workload: str
    method: str
    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    finish_reason: str
    tokens: list[int]

    def __post_init__(self) -> None:
        assert self.new_tokens == len(self.tokens), (self.new_tokens, self.tokens)


@dataclass(frozen=True, slots=True)
class TrainRecord:
    """One optimiser step (or a logged mean over several). `losses` holds the terms that make up `loss`."""

    stage: str
    step: int
    tokens: int
    loss: float
    lr: float
    elapsed_s: float
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """A short measurement of the machine between two requests of a run (or two turns), on text of its own.

    place: requests of the run that were complete before it. kind: of a step, or "burst". took_s: all of it.
    parts: of a step, seconds by part (`moexp.sim.calibration.step_timer.StepTimes`), with `experts` and `rows`; of a
    burst, the number of experts asked for at once -> seconds until all were there.
    """

    place: int
    kind: str
    took_s: float
    parts: dict[str, float] = field(default_factory=dict)


Record = TypeVar("Record", StepRecord, RequestRecord, TrainRecord, ProbeRecord)


class RecordWriter:
    """Appends records to a JSONL file, each handed to the system before `write` returns.

    Opening an existing file continues it: a last line that a kill has torn is cut off. A disk that fills up
    is a MoexpError, and the file then ends with the last complete record.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with atomic.writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = _complete_bytes(self._fd)
            os.ftruncate(self._fd, self._size)

    def write(self, record: StepRecord | RequestRecord | TrainRecord | ProbeRecord) -> None:
        """Adds one record. ValueError on a NaN or an infinity: a missing number is None."""
        line = (json.dumps(asdict(record), allow_nan=False, separators=(",", ":")) + "\n").encode()
        os.lseek(self._fd, self._size, os.SEEK_SET)
        try:
            with atomic.writing(self.path):
                atomic.write_all(self._fd, line)
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Waits until everything is on disk."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                with atomic.writing(self.path):
                    os.fsync(fd)
            finally:
                os.close(fd)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path, kind: type[Record], *, resuming: bool = False) -> Iterator[Record]:
    """The records of a file in order.

    Args:
        resuming: skip a torn last line (the run that wrote it was killed and is about to go on) instead of
            reporting it.

    Raises:
        MoexpError: no such file, a line that is not such a record (with its number), or a torn last line.
    """
    names = {field.name for field in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path} line {number}"
                if not line.endswith(b"\n"):  # only the last line can lack it, and only a kill does that
                    if resuming:
                        return
                    raise MoexpError("torn last line: the run was cut off", where=where, valid="resume the run")
                yield _parse(line, kind, names, needed, where)
    except OSError as error:
        raise MoexpError(f"cannot read: {error.strerror}", where=str(path)) from error


def _parse(line: bytes, kind: type[Record], names: set[str], needed: set[str], where: str) -> Record:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise MoexpError("not a line of JSON", where=where) from error
    if not isinstance(value, dict):
        raise MoexpError(f"not a {kind.__name__}", where=where)
    unknown, missing = sorted(value.keys() - names), sorted(needed - value.keys())
    if unknown or missing:
        what = f"unknown field {unknown[0]}" if unknown else f"missing field {missing[0]}"
        raise MoexpError(f"not a {kind.__name__}: {what}", where=where)
    try:
        return kind(**value)
    except AssertionError as error:
        raise MoexpError(f"{kind.__name__} contradicts itself: {error}", where=where) from error


def _complete_bytes(fd: int) -> int:
    """Bytes up to and including the last newline."""
    end = os.fstat(fd).st_size
    block = 1 << 16
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
