"""The decoding loop: propose, predict, select, prefetch, verify, commit. One StepRecord a cycle, for every method.

Every emitted token comes from a decoding step: the prompt is prefilled but for its last token, which is the first
pending one. So AR and speculation, first token and last, all see the same step shape.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from moexp.errors import MoexpError
from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decode_tree import TreeLoop
from moexp.runtime.drafters import Drafted, SelfDrafter, draft_path, routing_overlap, union_size, until_stop
from moexp.runtime.forward import AR, VERIFY, Engine, StepOut
from moexp.runtime.method import Method, check_method
from moexp.runtime.select import Truncation
from moexp.runtime.verify import Sampler, Sampling, Verdict, probabilities, verify_greedy, verify_sampled


@dataclass
class LogitsDigest:
    """Collects a digest of each emitted position's logits row, to compare long runs bit by bit."""

    rows: list[bytes] = field(default_factory=list)

    def __call__(self, logits_BV: Tensor) -> None:
        for row_V in logits_BV.cpu().numpy():
            self.rows.append(hashlib.blake2b(row_V.tobytes(), digest_size=16).digest())


@dataclass
class _Proposal:
    """Kept drafted tokens, and what every draft step predicted (one may have been dropped by the policy)."""

    kept: list[Drafted] = field(default_factory=list)
    routing: list[np.ndarray] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [drafted.token for drafted in self.kept]


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
    on_logits: Callable[[Tensor], None] | None = None,
) -> Generator[StepRecord, None, RequestRecord]:
    """Decode one prompt; yields a record after each cycle, returns the request's.

    Args:
        engine: left with the request's positions in its cache.
        prompt_ids: at least one token.
        method: how.
        sampling: applied to the target and the draft alike.
        max_new_tokens: emitted at most; from 1.
        stop_ids: the answer ends with the first of them (which is emitted).
        request, workload: for the records.
        on_logits: called each cycle with the fp32 logits of the positions it emitted, [emitted, V].

    Raises:
        MoexpError: an empty prompt, more positions than the target's context, or a method that the engine cannot run.
    """
    check_method(method, engine)
    if not prompt_ids:
        raise MoexpError("an empty prompt", valid="at least one token")
    if max_new_tokens < 1:
        raise MoexpError(f"{max_new_tokens} new tokens", where="decode.max_new_tokens", valid="from 1")
    begin_s = time.perf_counter()
    engine.start(len(prompt_ids) + max_new_tokens)
    engine.prefill(prompt_ids[:-1])
    loop: _Loop | TreeLoop
    if method.tree is None:
        loop = _Loop(engine, method, sampling, frozenset(stop_ids))
    else:
        loop = TreeLoop(engine, method, sampling, frozenset(stop_ids), prompt_ids)
    prefill_s = time.perf_counter() - begin_s
    pending, tokens, decode_s, cycle, finish = prompt_ids[-1], list[int](), 0.0, 0, ""
    while not finish:
        step, logits_BV = loop.cycle(pending, max_new_tokens - len(tokens), request, cycle)
        tokens += step.tokens
        decode_s += step.cycle_s
        pending, cycle = tokens[-1], cycle + 1
        if pending in loop.stop_ids:
            finish = "stop"
        elif len(tokens) == max_new_tokens:
            finish = "length"
        if on_logits is not None:
            on_logits(logits_BV)
        yield step
    return RequestRecord(
        request=request,
        workload=workload,
        method=method.label,
        prompt_tokens=len(prompt_ids),
        new_tokens=len(tokens),
        prefill_s=prefill_s,
        decode_s=decode_s,
        finish_reason=finish,
        tokens=tokens,
    )


def decode_all(
    engine: Engine,
    prompt_ids: Sequence[int],
    method: Method,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    **options: Any,
) -> tuple[list[StepRecord], RequestRecord]:
    """`decode` to its end, with the same arguments: all step records and the request's record."""
    steps: list[StepRecord] = []
    running = decode(engine, prompt_ids, method, sampling, max_new_tokens=max_new_tokens, **options)
    while True:
        try:
            steps.append(next(running))
        except StopIteration as end:
            return steps, end.value


class _Loop:
    def __init__(self, engine: Engine, method: Method, sampling: Sampling, stop_ids: frozenset[int]) -> None:
        self.engine, self.method, self.sampling, self.stop_ids = engine, method, sampling, stop_ids
        self.sampler = Sampler(sampling.seed)
        self.drafter: SelfDrafter | None = None
        if not method.is_ar:
            inline = method.prefetch and method.prefetch_inline
            path = draft_path(method.drafter, method.r, prefetch=inline)
            self.drafter = SelfDrafter(engine, path, sampling, self.sampler)

    def cycle(self, pending: int, room: int, request: int, number: int) -> tuple[StepRecord, Tensor]:
        """One cycle from `pending`, whose position is the engine's length; emits 1 to `room` tokens.

        Returns:
            the record, and the logits of the emitted positions.
        """
        engine, store = self.engine, self.engine.store
        before = store.counters.snapshot()
        begin_s = time.perf_counter()
        store.begin_cycle()
        base = engine.length
        proposal = self._propose(pending, min(self.method.max_draft, room - 1))
        engine.rollback(base)
        draft_end_s = time.perf_counter()
        out = engine.step([pending, *proposal.tokens], AR if self.method.is_ar else VERIFY)
        verdict = self._verify(proposal.kept, out.logits_BV)
        verify_end_s = time.perf_counter()
        emitted = until_stop(self.stop_ids, [*proposal.tokens[: verdict.accepted], verdict.bonus])
        # The last emitted token is pending: it has no keys and values yet.
        engine.rollback(base + len(emitted))
        end_s = time.perf_counter()
        overlap, slots = self._overlap(proposal, out)
        record = StepRecord(
            request=request,
            cycle=number,
            method=self.method.label,
            drafted=len(proposal.kept),
            accepted=min(verdict.accepted, len(emitted)),
            emitted=len(emitted),
            tokens=emitted,
            confidences=[drafted.confidence for drafted in proposal.kept],
            unique_draft=self._unique_draft(proposal),
            unique_verify=union_size(out.routing_LBk, engine.spec.num_experts),
            union_layers=len(engine.spec.moe_layers),
            router_overlap=overlap,
            router_slots=slots,
            draft_s=draft_end_s - begin_s,
            verify_s=verify_end_s - draft_end_s,
            cycle_s=end_s - begin_s,
            store=(store.counters - before).as_dict(),
        )
        return record, out.logits_BV[: len(emitted)]

    def _propose(self, pending: int, limit: int) -> _Proposal:
        """Draft up to `limit` tokens; the policy, or a drafted stop token, ends it sooner."""
        proposal = _Proposal()
        if self.drafter is None or limit < 1:
            return proposal
        method, engine = self.method, self.engine
        truncation = Truncation(
            method.policy,
            method.tau,
            None if method.budget == "cache" else method.budget,
            getattr(engine.store, "capacity", None),
        )
        for drafted in self.drafter.propose(pending):
            proposal.routing.append(drafted.routing_Lk)
            if not truncation.offer(drafted.confidence, engine.expert_ids(drafted.routing_Lk)):
                return proposal
            proposal.kept.append(drafted)
            if method.prefetch and not method.prefetch_inline:
                engine.prefetch(drafted.routing_Lk)
            if len(proposal.kept) == limit or drafted.token in self.stop_ids:
                break
        if method.lookahead:
            ahead = self.drafter.step(proposal.kept[-1].token)
            proposal.routing.append(ahead.routing_Lk)
            if method.prefetch and not method.prefetch_inline:
                engine.prefetch(ahead.routing_Lk)
        return proposal

    def _verify(self, kept: list[Drafted], logits_BV: Tensor) -> Verdict:
        tokens = [drafted.token for drafted in kept]
        if self.sampling.greedy:
            return verify_greedy(tokens, logits_BV.argmax(-1).tolist())
        q_DV = [drafted.probs_V for drafted in kept if drafted.probs_V is not None]
        p_DV = probabilities(logits_BV, self.sampling)
        return verify_sampled(tokens, q_DV, p_DV, self.sampler.flip, self.sampler.draw)

    def _unique_draft(self, proposal: _Proposal) -> int | None:
        if self.drafter is None:
            return None
        if not proposal.routing:
            return 0
        return union_size(
            np.stack(proposal.routing, axis=1)[..., : self.drafter.path.top_r], self.engine.spec.num_experts
        )

    def _overlap(self, proposal: _Proposal, out: StepOut) -> tuple[int | None, int | None]:
        """How well the draft path's router predicted, over the block's rows that it saw."""
        if not proposal.routing:
            return None, None
        rows = min(len(proposal.routing), out.routing_LBk.shape[1])
        return routing_overlap(np.stack(proposal.routing[:rows], axis=1), out.routing_LBk[:, :rows])
