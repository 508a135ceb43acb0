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
from moexp.runtime.decoding.speculation import Speculation
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
    check_request([prompt_ids], max_new_tokens)
    begin_s = time.perf_counter()
    engine.start(len(prompt_ids) + max_new_tokens)
    engine.prefill(prompt_ids[:-1])
    stops = frozenset(stop_ids)
    speculation = make_speculation(engine, method, sampling, Sampler(sampling.seed), stops, prompt_ids, max_new_tokens)
    answer = Answer(
        request, workload, method, speculation, engine.state, len(prompt_ids), max_new_tokens, stops, prompt_ids[-1]
    )
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
    check_request(prompts, max_new_tokens)
    numbers, names, stops = requests or range(len(prompts)), workloads or [""] * len(prompts), frozenset(stop_ids)
    alone = engine.state
    try:
        engine.start(max(map(len, prompts)) + max_new_tokens)
        answers = []
        for number, name, ids in zip(numbers, names, prompts, strict=True):
            engine.activate(state := engine.new_state())
            Engine.prefill(engine, ids[:-1])  # not an engine's that keeps its last prompt: states are new
            sampler = Sampler(sampling.seed)
            speculation = make_speculation(engine, method, sampling, sampler, stops, ids, max_new_tokens)
            answers.append(
                Answer(number, name, method, speculation, state, len(ids), max_new_tokens, stops, pending=ids[-1])
            )
        steps: list[StepRecord] = []
        while live := [answer for answer in answers if not answer.finish]:
            steps += [cycle.record for cycle in run_cycle(engine, live, batch=len(live))]
    finally:
        engine.activate(alone)
    return steps, [answer.record() for answer in answers]


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Whether there is something to decode.

    Raises:
        MoexpError: an empty prompt, or no room for a token.
    """
    if not all(prompts):
        raise MoexpError("an empty prompt", valid="at least one token")
    if max_new_tokens < 1:
        raise MoexpError(f"{max_new_tokens} new tokens", where="decode.max_new_tokens", valid="from 1")


def make_speculation(
    engine: Engine,
    method: Method,
    sampling: Sampling,
    sampler: Sampler,
    stop_ids: frozenset[int],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
) -> Speculation:
    """A method at work on a request whose prompt is prefilled but for its last token."""
    if method.tree is None:
        return ChainSpeculation(engine, method, sampling, sampler, stop_ids)
    return TreeSpeculation(engine, method, sampling, sampler, prompt_ids, max_new_tokens)
