"""Methods that take turns on one prompt, a second each, until all are through.

A disk or a neighbour's load changes within seconds. Methods that decoded whole answers one after the other would meet
different machines; in short turns they share the slow moments as they share the quick ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from moexp.bench.jobs import Job, RunPlan
from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decoding.cycle import Cycle
from moexp.runtime.decoding.decode import decode
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Engine, RequestState
from moexp.runtime.recording.files import RecordedPass
from moexp.runtime.recording.recorder import PassLog
from moexp.runtime.store.counters import StoreCounters

SLICE_S = 1.0


@dataclass
class Turn:
    """One method's decoding of a prompt, under way or through."""

    method: Method
    engine: Engine
    state: RequestState
    running: Generator[Cycle, None, RequestRecord]
    steps: list[StepRecord] = field(default_factory=list)
    passes: list[RecordedPass] = field(default_factory=list)
    record: RequestRecord | None = None
    """Of the request, once it is through."""
    carried: StoreCounters | None = None
    """What the store did between its turns with what its last cycle had left there."""


def in_turns(
    plan: RunPlan,
    job: Job,
    engines: Sequence[tuple[Method, Engine]],
    log: PassLog | None = None,
    between: Callable[[], None] = lambda: None,
) -> Iterator[Turn]:
    """Decodes a prompt by methods in turns of whole cycles; gives each when it is through.

    Each method decodes as it would alone: in a state of its own, over a store that keeps nothing from one cycle to the
    next. What a cycle leaves there is waited for at the end of a turn, and counted to the method's next cycle. A turn
    ends with the first cycle that ends after `plan.slice_s` seconds.

    Args:
        engines: the methods with the engine of each; they may share engines, and all share one store.
        log: the observer of the engines; each method is given what it logged.
        between: called before every turn.
    """
    for engine in {id(engine): engine for _, engine in engines}.values():
        engine.start(len(job.prompt_ids) + plan.max_new_tokens)  # states must be long enough from the beginning
    waiting = [
        Turn(
            method,
            engine,
            engine.new_state(),
            decode(
                engine, job.prompt_ids, method, plan.sampling, max_new_tokens=plan.max_new_tokens,
                stop_ids=plan.stop_ids, request=job.request, workload=job.workload,
            ),
        )
        for method, engine in engines
    ]  # fmt: skip
    while waiting:
        for turn in list(waiting):
            between()
            if log is not None:
                log.clear()
            turn.engine.activate(turn.state)
            _advance(turn, plan.slice_s or 0.0)
            before = turn.engine.store.counters.snapshot()
            turn.engine.store.settle()
            turn.carried = turn.engine.store.counters - before
            if log is not None:
                turn.passes += log.take()
            if turn.record is not None:
                waiting.remove(turn)
                yield turn


def _advance(turn: Turn, slice_s: float) -> None:
    """Decodes one turn; sets the request's record where it is the last."""
    begin_s = time.perf_counter()
    while True:
        try:
            step = next(turn.running).record
        except StopIteration as end:
            turn.record = end.value
            return
        if turn.carried is not None:
            step = dataclasses.replace(step, store=_added(step.store or {}, turn.carried.as_dict()))
            turn.carried = None
        turn.steps.append(step)
        if time.perf_counter() - begin_s >= slice_s:
            return


def _added(counts: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {name: counts.get(name, 0) + more.get(name, 0) for name in {**counts, **more}}
