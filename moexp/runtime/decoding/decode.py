"""The decoding loop over requests: prefill, then cycle after cycle to the end. AR is a method like any other.

Every emitted token comes from a decoding step: the prompt is prefilled but for its last token, which is the first
pending one. So AR and speculation, first token and last, all see the same step shape.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moexp.base.errors import MoexpError
from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decoding.chain import ChainSpeculation
from moexp.runtime.decoding.cycle import Answer, Cycle, run_cycle
from moexp.runtime.decoding.method import Method, check_method
from moexp.runtime.decoding.speculation import Request
from moexp.runtime.decoding.tree import TreeSpeculation
from moexp.runtime.engine.engine import Engine
from moexp.runtime.verifiers.sampling import Sampler, Sampling


@dataclass
class LogitsDigest:
    """Collects a digest of each emitted position's logits row, to compare long runs bit by bit."""

    rows: list[bytes] = field(default_factory=list)

    def __call__(self, cycle: Cycle) -> None:
        for row_V in cycle.logits_BV.cpu().numpy():
            self.rows.append(hashlib.blake2b(row_V.tobytes(), digest_size=16).digest())


def decode(
    engine: Engine,
    prompt_ids: Sequence[int],
    method: Method,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    request: int = 0,
    workload: str = "",
) -> Generator[Cycle, None, RequestRecord]:
    """Decode one prompt; yields each cycle, returns the request's record.

    Args:
        engine: left with the request's positions in its cache.
        prompt_ids: at least one token.
        method: how.
        sampling: applied to the target and the draft alike.
        max_new_tokens: emitted at most; from 1.
        stop_ids: the answer ends with the first of them (which is emitted).
        request, workload: for the records.

    Raises:
        MoexpError: an empty prompt, more positions than the target's context, or a method that the engine cannot run.
    """
    check_method(method, engine)
    todo = Request(prompt_ids, max_new_tokens, stop_ids, request, workload)
    begin_s = time.perf_counter()
    engine.start(len(prompt_ids) + max_new_tokens)
    engine.prefill(prompt_ids[:-1])
    answer = begin_answer(engine, method, sampling, Sampler(sampling.seed), todo)
    answer.prefill_s = time.perf_counter() - begin_s
    while not answer.finish:
        yield run_cycle(engine, [answer])[0]
    return answer.record()


def decode_all(
    engine: Engine,
    prompt_ids: Sequence[int],
    method: Method,
    sampling: Sampling,
    *,
    on_cycle: Callable[[Cycle], None] = lambda cycle: None,
    **options: Any,
) -> tuple[list[StepRecord], RequestRecord]:
    """`decode` to its end: all step records and the request's record.

    Args:
        on_cycle: called after each cycle.
        options: of `decode`.
    """
    steps: list[StepRecord] = []
    running = decode(engine, prompt_ids, method, sampling, **options)
    while True:
        try:
            cycle = next(running)
        except StopIteration as end:
            return steps, end.value
        steps.append(cycle.record)
        on_cycle(cycle)


def decode_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    method: Method,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    requests: Sequence[int] = (),
    workloads: Sequence[str] = (),
) -> tuple[list[StepRecord], list[RequestRecord]]:
    """Decode a batch of prompts to its end.

    Args:
        requests, workloads: of the prompts, for the records; by default their indices, and none.

    Returns:
        one StepRecord a cycle and live request, and a RequestRecord each. In a cycle's records `unique_verify` is the
        union over the batch, `batch` its live requests, and times and the store's counters are the batch's: they stand
        in each of them.

    Raises:
        MoexpError: as `decode`; an empty batch.
    """
    check_method(method, engine)
    if not prompts or not all(prompts):
        raise MoexpError("an empty batch or prompt", valid="at least one prompt of at least one token")
    labels = zip(requests or range(len(prompts)), workloads or [""] * len(prompts), strict=True)
    todo = [Request(ids, max_new_tokens, stop_ids, *label) for ids, label in zip(prompts, labels, strict=True)]
    alone = engine.state
    try:
        engine.start(max(map(len, prompts)) + max_new_tokens)
        answers = []
        for request in todo:
            engine.activate(engine.new_state())
            Engine.prefill(
                engine, request.prompt_ids[:-1]
            )  # not an engine's that keeps its last prompt: states are new
            answers.append(begin_answer(engine, method, sampling, Sampler(sampling.seed), request))
        steps: list[StepRecord] = []
        while live := [answer for answer in answers if not answer.finish]:
            steps += [cycle.record for cycle in run_cycle(engine, live, batch=len(live))]
    finally:
        engine.activate(alone)
    return steps, [answer.record() for answer in answers]


def begin_answer(engine: Engine, method: Method, sampling: Sampling, sampler: Sampler, request: Request) -> Answer:
    """A method at work on a request whose prompt is prefilled, but for its last token, in the engine's state."""
    kind = ChainSpeculation if method.tree is None else TreeSpeculation
    return Answer(request, method, engine.state, kind(engine, method, sampling, sampler, request))
