"""The decoding loop: propose, predict, select, prefetch, verify, commit. One StepRecord a cycle, for every method.

Every emitted token comes from a decoding step: the prompt is prefilled but for its last token, which is the first
pending one. So AR and speculation, first token and last, all see the same step shape.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decoding.cycle import Loop, Prepared, check_request, finish_reason
from moexp.runtime.decoding.method import Method, check_method
from moexp.runtime.decoding.tree import TreeCycle, TreeLoop
from moexp.runtime.drafters.chain import Drafted, SelfDrafter, draft_path, routing_overlap, union_size, until_stop
from moexp.runtime.engine.engine import AR, VERIFY, Block, Engine, StepOut
from moexp.runtime.selectors.chain import Truncation
from moexp.runtime.verifiers.chain import Sampler, Sampling, Verdict, probabilities, verify_greedy, verify_sampled


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
    on_tree: Callable[[TreeCycle], None] | None = None,
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
        on_tree: called each cycle of a method that drafts trees.

    Raises:
        MoexpError: an empty prompt, more positions than the target's context, or a method that the engine cannot run.
    """
    check_method(method, engine)
    check_request([prompt_ids], max_new_tokens)
    begin_s = time.perf_counter()
    engine.start(len(prompt_ids) + max_new_tokens)
    engine.prefill(prompt_ids[:-1])
    loop = make_loop(engine, method, sampling, frozenset(stop_ids), prompt_ids, max_new_tokens)
    if isinstance(loop, TreeLoop):
        loop.on_tree = on_tree
    prefill_s = time.perf_counter() - begin_s
    pending, tokens, decode_s, cycle, finish = prompt_ids[-1], list[int](), 0.0, 0, ""
    while not finish:
        before = engine.store.counters.snapshot()
        engine.store.begin_cycle()
        prepared = loop.prepare(pending, max_new_tokens - len(tokens))
        out = engine.run(prepared.block, loop.path)
        step, logits_BV = loop.finish(prepared, out, request, cycle)
        step = replace(step, store=(engine.store.counters - before).as_dict())
        tokens += step.tokens
        decode_s += step.cycle_s
        pending, cycle = tokens[-1], cycle + 1
        finish = finish_reason(tokens, loop.stop_ids, max_new_tokens)
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


def make_loop(
    engine: Engine,
    method: Method,
    sampling: Sampling,
    stop_ids: frozenset[int],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
) -> Loop:
    """The loop of a method on a request whose prompt is prefilled but for its last token."""
    if method.tree is None:
        return ChainLoop(engine, method, sampling, stop_ids)
    return TreeLoop(engine, method, sampling, stop_ids, prompt_ids, max_new_tokens)


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


@dataclass
class _PreparedChain(Prepared):
    proposal: _Proposal
    base: int


class ChainLoop:
    """Cycle after cycle on one request, with a chain of drafts; without a drafter, AR."""

    def __init__(self, engine: Engine, method: Method, sampling: Sampling, stop_ids: frozenset[int]) -> None:
        self.engine, self.method, self.sampling, self.stop_ids = engine, method, sampling, stop_ids
        self.sampler = Sampler(sampling.seed)
        self.path = AR if method.is_ar else VERIFY
        self.drafter: SelfDrafter | None = None
        if not method.is_ar:
            inline = method.prefetch and method.prefetch_inline
            path = draft_path(method.drafter, method.r, prefetch=inline, prefetch_top=method.prefetch_top)
            self.drafter = SelfDrafter(engine, path, sampling, self.sampler)

    def prepare(self, pending: int, room: int) -> Prepared:
        """See `Loop`."""
        begin_s = time.perf_counter()
        base = self.engine.length
        proposal = self._propose(pending, min(self.method.max_draft, room - 1))
        self.engine.rollback(base)
        block = Block([pending, *proposal.tokens])
        return _PreparedChain(block, begin_s, time.perf_counter(), proposal, base)

    def finish(self, prepared: Prepared, out: StepOut, request: int, number: int) -> tuple[StepRecord, Tensor]:
        """See `Loop`."""
        assert isinstance(prepared, _PreparedChain)
        engine, proposal = self.engine, prepared.proposal
        verdict = self._verify(proposal.kept, out.logits_BV)
        verified_s = time.perf_counter()
        emitted = until_stop(self.stop_ids, [*proposal.tokens[: verdict.accepted], verdict.bonus])
        # The last emitted token is pending: it has no keys and values yet.
        engine.rollback(prepared.base + len(emitted))
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
            draft_s=prepared.drafted_s - prepared.begin_s,
            verify_s=verified_s - prepared.drafted_s,
            cycle_s=end_s - prepared.begin_s,
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
                engine.prefetch(drafted.routing_Lk, method.prefetch_top)
            if len(proposal.kept) == limit or drafted.token in self.stop_ids:
                break
        if method.lookahead:
            ahead = self.drafter.step(proposal.kept[-1].token)
            proposal.routing.append(ahead.routing_Lk)
            if method.prefetch and not method.prefetch_inline:
                engine.prefetch(ahead.routing_Lk, method.prefetch_top)
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
