"""A chain of drafts, or none (AR), in a cycle of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moexp.runtime.decoding.method import Method
from moexp.runtime.decoding.speculation import Proposal, Request
from moexp.runtime.drafters.self_chain import DRAFTERS, Drafted, SelfDrafter
from moexp.runtime.engine.engine import AR, VERIFY, Block, Engine
from moexp.runtime.selectors.confidence_expansion import Truncation
from moexp.runtime.selectors.expert_sets import Words
from moexp.runtime.verifiers.chain import verify_chain
from moexp.runtime.verifiers.sampling import Sampler, Sampling


@dataclass
class _Chain:
    """Drafted tokens that are verified, and what every draft step predicted (one may be dropped by the policy)."""

    drafted: list[Drafted] = field(default_factory=list)
    routing: list[np.ndarray] = field(default_factory=list)


class ChainSpeculation:
    """A chain of drafts on one request; without a drafter, AR.

    Paper: DraftExpert Algorithm 1.
    """

    def __init__(self, engine: Engine, method: Method, sampling: Sampling, sampler: Sampler, request: Request) -> None:
        self.engine, self.method, self.sampling, self.sampler = engine, method, sampling, sampler
        self.stop_ids = request.stop_ids
        self.path = AR if method.is_ar else VERIFY
        self.drafter: SelfDrafter | None = None
        if not method.is_ar:
            inline = method.prefetch and method.prefetch_inline
            path = replace(DRAFTERS[method.drafter](method.r), prefetch=inline, prefetch_top=method.prefetch_top)
            self.drafter = SelfDrafter(engine, path, sampling, sampler)

    def propose(self, pending: int, room: int, covered_LW: Words | None) -> Proposal:
        """See `Speculation`."""
        base = self.engine.length
        chain, ran = _Chain(), None
        if self.drafter is not None:
            self._draft(self.drafter, chain, pending, min(self.method.max_draft, room - 1))
            ran = [routing_Lk[:, : self.drafter.path.top_r] for routing_Lk in chain.routing]
        self.engine.rollback(base)
        tokens = [drafted.token for drafted in chain.drafted]
        q_DV = [drafted.probs_V for drafted in chain.drafted if drafted.probs_V is not None]
        return Proposal(
            block=Block([pending, *tokens]),
            confidences=[drafted.confidence for drafted in chain.drafted],
            verify=lambda logits_BV: verify_chain(tokens, q_DV, logits_BV, self.sampling, self.sampler),
            ran=ran,
            predicted=dict(enumerate(chain.routing[: len(tokens) + 1])),
        )

    def commit(self, base: int, rows: Sequence[int], emitted: Sequence[int]) -> None:
        """See `Speculation`."""
        self.engine.rollback(base + len(rows))

    def _draft(self, drafter: SelfDrafter, chain: _Chain, pending: int, limit: int) -> None:
        """Draft up to `limit` tokens; the policy, or a drafted stop token, ends it sooner."""
        if limit < 1:
            return
        method, engine = self.method, self.engine
        budget = None if method.budget == "cache" else method.budget
        truncation = Truncation(method.policy, method.tau, budget, getattr(engine.store, "capacity", None))
        for drafted in drafter.propose(pending):
            chain.routing.append(drafted.routing_Lk)
            if not truncation.offer(drafted.confidence, engine.expert_ids(drafted.routing_Lk)):
                return
            chain.drafted.append(drafted)
            if method.prefetch and not method.prefetch_inline:
                engine.prefetch(drafted.routing_Lk, method.prefetch_top)
            if len(chain.drafted) == limit or drafted.token in self.stop_ids:
                return
