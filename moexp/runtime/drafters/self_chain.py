"""Self-drafting of chains: the target itself on a cheaper path through its MoE layers, one token at a time.

A drafted block is [pending token, d_1 .. d_K]. Draft step i runs token i - 1 of the block and gives d_i and, from
the draft path's router, the experts that the verifier will probably want for token i - 1. Steps write keys and
values behind the verified prefix; the caller rolls them back before verification, which overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moexp.runtime.engine.engine import Block, Engine
from moexp.runtime.engine.moe import StepPath
from moexp.runtime.verifiers.sampling import Sampler, Sampling, probabilities


@dataclass(frozen=True)
class Drafted:
    """What one draft step gave.

    Attributes:
        token: d_i.
        confidence: q_i, the largest softmax probability of the draft's logits at T = 1. It does not depend on which
            token was drawn.
        routing_Lk: predicted verifier experts of the step's input token, by layer, by descending gate.
        probs_V: distribution that the token was drawn from; None when greedy.
    """

    token: int
    confidence: float
    routing_Lk: np.ndarray
    probs_V: Tensor | None


DRAFTERS: dict[str, Callable[[int], StepPath]] = {
    "top-r": lambda r: StepPath("draft", top_r=r),
    "draft-expert": lambda r: StepPath("draft", top_r=r, draft_experts=True),
    # The control: the target unchanged in the verifier's own step shape, so that every greedy draft must be accepted.
    "target": lambda r: StepPath("draft", whole_block=True),
}
"""Draft paths by drafter, given r: routed experts of "top-r" and "draft-expert" (the paper's is 1)."""


class SelfDrafter:
    """Drafts with an engine's own target.

    Args:
        engine: its cache ends before the pending token.
        path: one of `DRAFTERS`.
        sampling: as for the target.
        sampler: the request's.

    Paper: DraftExpert eq. 5.
    """

    def __init__(self, engine: Engine, path: StepPath, sampling: Sampling, sampler: Sampler) -> None:
        self.engine, self.path, self.sampling, self.sampler = engine, path, sampling, sampler

    def propose(self, pending: int) -> Iterator[Drafted]:
        """Draft steps one after another from `pending` on, for as long as the caller iterates."""
        token = pending
        while True:
            drafted = self.step(token)
            yield drafted
            token = drafted.token

    def step(self, token: int) -> Drafted:
        """One draft step with `token` as its input."""
        out = self.engine.run(Block([token]), self.path)
        logits_V = out.logits_BV[0]
        top, best = logits_V.max(-1)
        confidence = 1.0 / float((logits_V - top).exp_().sum())
        routing_Lk = out.routing_LBk[:, 0]
        if self.sampling.greedy:
            return Drafted(int(best), confidence, routing_Lk, None)
        probs_V = probabilities(logits_V, self.sampling)
        return Drafted(self.sampler.draw(probs_V), confidence, routing_Lk, probs_V)
