"""Methods that take turns on one prompt, a second each, until all are through.

A disk or a neighbour's load changes within seconds. Methods that decoded whole answers one after the other would meet
different machines; in short turns they share the slow moments as they share the quick ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decoding.cycle import Cycle
from moexp.runtime.decoding.decode import decode
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Engine, RequestState
from moexp.runtime.recording.files import RecordedPass
from moexp.runtime.recording.recorder import PassLog
from moexp.runtime.store.counters import StoreCounters
from moexp.runtime.verifiers.sampling import Sampling

SLICE_S = 1.0


@dataclass
class _Turn:
    """One method's decoding, under way."""

    method: Method
    engine: Engine
    state: RequestState
    running: Generator[Cycle, None, RequestRecord]
    steps: list[StepRecord] = field(default_factory=list)
    passes: list[RecordedPass] = field(default_factory=list)
    carried: StoreCounters | None = None
    """What the store did between its turns with what its last cycle had left there."""


@dataclass(frozen=True)
class Decoded:
    """A method that is through with the prompt."""

    method: Method
    steps: list[StepRecord]
    record: RequestRecord
    passes: list[RecordedPass]


def in_turns(
    methods: Sequence[tuple[Method, Engine]],
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    request: int = 0,
    workload: str = "",
    log: PassLog | None = None,
    between: Callable[[], None] = lambda: None,
    slice_s: float = SLICE_S,
) -> Iterator[Decoded]:
    """Decodes a prompt by all methods, in turns of whole cycles; gives each when it is through.

    Each method decodes as it would alone: in a state of its own, over a store that keeps nothing from one cycle to the
    next. What a cycle leaves there is waited for at the end of a turn, and counted to the method's next cycle.

    Args:
        methods: with the engine of each; they may share engines, and all share one store.
        log: the observer of the engines; each method is given what it logged.
        between: called before every turn.
        slice_s: a turn ends with the first cycle that ends after so many seconds; 0: it is one cycle.
    """
    for engine in {id(engine): engine for _, engine in methods}.values():
        engine.start(len(prompt_ids) + max_new_tokens)  # states must be long enough from the beginning
    waiting = [
        _Turn(
            method,
            engine,
            engine.new_state(),
            decode(
                engine, prompt_ids, method, sampling,
                max_new_tokens=max_new_tokens, stop_ids=stop_ids, request=request, workload=workload,
            ),
        )
        for method, engine in methods
    ]  # fmt: skip
    while waiting:
        for turn in list(waiting):
            between()
            if log is not None:
                log.clear()
            turn.engine.activate(turn.state)
            record = _take(turn, slice_s)
            before = turn.engine.store.counters.snapshot()
            turn.engine.store.settle()
            turn.carried = turn.engine.store.counters - before
            if log is not None:
                turn.passes += log.take()
            if record is not None:
                waiting.remove(turn)
                yield Decoded(turn.method, turn.steps, record, turn.passes)


def _take(turn: _Turn, slice_s: float) -> RequestRecord | None:
    """One turn; the record of the request where that is its last."""
    begin_s = time.perf_counter()
    while True:
        try:
            step = next(turn.running).record
        except StopIteration as end:
            record: RequestRecord = end.value
            return record
        if turn.carried is not None:
            step = dataclasses.replace(step, store=_added(step.store or {}, turn.carried.as_dict()))
            turn.carried = None
        turn.steps.append(step)
        if time.perf_counter() - begin_s >= slice_s:
            return None


def _added(counts: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {name: counts.get(name, 0) + more.get(name, 0) for name in {**counts, **more}}
