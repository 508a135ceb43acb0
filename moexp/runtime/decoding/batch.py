"""Several requests in lockstep: each drafts by itself, then one step verifies them all over the union of their experts.

A request's rows run in the same kernels as alone (`Engine.step_batch`), so its output is its batch-1 output to the bit;
what a batch shares is the loading of experts. Rows that end early leave the batch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moexp.base.errors import MoexpError
from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decoding.chain import make_loop
from moexp.runtime.decoding.cycle import Loop, Prepared, check_request, finish_reason
from moexp.runtime.decoding.method import Method, check_method
from moexp.runtime.decoding.tree import TreeLoop
from moexp.runtime.drafters.chain import union_size
from moexp.runtime.engine.engine import Engine, RequestState
from moexp.runtime.selectors.tree import Words
from moexp.runtime.verifiers.chain import Sampling


@dataclass
class _Row:
    """One request of the batch, while it runs."""

    request: int
    state: RequestState
    loop: Loop
    pending: int
    tokens: list[int]
    prompt_tokens: int
    decode_s: float = 0.0
    finish: str = ""


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
        requests, workloads: of the prompts, for the records; by default their places, and none.

    Returns:
        one StepRecord a cycle and live request, and a RequestRecord each. In a cycle's records `unique_verify` is the
        union over the whole batch, `batch` its live requests, and times and the store's counters are the batch's: they
        stand in each of them.

    Raises:
        MoexpError: as `decode`; an empty batch.
    """
    check_method(method, engine)
    if not prompts or not all(prompts):
        raise MoexpError("an empty batch or prompt", valid="at least one prompt of at least one token")
    check_request(prompts, max_new_tokens)
    alone = engine.state
    try:
        rows = _start(engine, prompts, method, sampling, max_new_tokens, frozenset(stop_ids))
        for row, number in zip(rows, requests, strict=False):
            row.request = number
        steps: list[StepRecord] = []
        number = 0
        while live := [row for row in rows if not row.finish]:
            steps += _cycle(engine, live, max_new_tokens, number)
            number += 1
    finally:
        engine.activate(alone)
    return steps, [
        RequestRecord(
            request=row.request,
            workload=workload,
            method=method.label,
            prompt_tokens=row.prompt_tokens,
            new_tokens=len(row.tokens),
            prefill_s=0.0,
            decode_s=row.decode_s,
            finish_reason=row.finish,
            tokens=row.tokens,
        )
        for row, workload in zip(rows, workloads or [""] * len(rows), strict=True)
    ]


def _start(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    method: Method,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> list[_Row]:
    """Prefills every prompt in a state of its own."""
    engine.start(max(map(len, prompts)) + max_new_tokens)
    rows = []
    for request, ids in enumerate(prompts):
        state = engine.new_state()
        engine.activate(state)
        Engine.prefill(engine, ids[:-1])  # not an engine's that keeps its last prompt: states are new
        loop = make_loop(engine, method, sampling, stop_ids, ids, max_new_tokens)
        rows.append(_Row(request, state, loop, ids[-1], [], len(ids)))
    return rows


def _cycle(engine: Engine, rows: Sequence[_Row], max_new_tokens: int, number: int) -> list[StepRecord]:
    store = engine.store
    before, begin_s = store.counters.snapshot(), time.perf_counter()
    store.begin_cycle()
    prepared: list[Prepared] = []
    covered_LW: Words | None = None
    for row in rows:
        engine.activate(row.state)
        room = max_new_tokens - len(row.tokens)
        if isinstance(row.loop, TreeLoop):
            tree = row.loop.prepare(row.pending, room, covered_LW)
            covered_LW = tree.covered_LW
            prepared.append(tree)
        else:
            prepared.append(row.loop.prepare(row.pending, room))
    drafted_s = time.perf_counter()
    outs = engine.step_batch([one.block for one in prepared], [row.state for row in rows], rows[0].loop.path)
    verified_s = time.perf_counter()
    union = union_size(np.concatenate([out.routing_LBk for out in outs], axis=1), engine.spec.num_experts)
    records, predict_s = [], 0.0
    for row, one, out in zip(rows, prepared, outs, strict=True):
        engine.activate(row.state)
        record, _ = row.loop.finish(one, out, row.request, number)
        row.tokens += record.tokens
        row.pending = row.tokens[-1]
        row.finish = finish_reason(row.tokens, row.loop.stop_ids, max_new_tokens)
        records.append(record)
        predict_s += record.predict_s or 0.0
    end_s = time.perf_counter()
    counters = (store.counters - before).as_dict()
    for row in rows:
        row.decode_s += end_s - begin_s
    return [
        replace(
            record,
            batch=len(rows),
            unique_verify=union,
            draft_s=drafted_s - begin_s - predict_s,
            predict_s=predict_s or None,
            verify_s=verified_s - drafted_s,
            cycle_s=end_s - begin_s,
            store=counters,
        )
        for record in records
    ]
