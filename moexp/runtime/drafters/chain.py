"""Self-drafting: the target itself on a cheaper path through its MoE layers, one token at a time.

A drafted block is [pending token, d_1 .. d_K]. Draft step i runs token i - 1 of the block and gives d_i and, from
the draft path's router, the experts that the verifier will probably want for token i - 1. Steps write keys and
values behind the verified prefix; the caller rolls them back before verification, which overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from moexp.runtime.engine.engine import Block, Engine
from moexp.runtime.engine.moe import StepPath
from moexp.runtime.verifiers.chain import Sampler, Sampling, probabilities


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


def draft_path(drafter: str, r: int, *, prefetch: bool, prefetch_top: int | None = None) -> StepPath:
    """The path that a drafter takes: how many routed experts, with or without draft experts.

    Args:
        drafter: a key of `DRAFTERS`.
        r: routed experts of "top-r" and "draft-expert" (the paper's is 1).
        prefetch: announce predicted experts as soon as a layer's router has spoken.
        prefetch_top: of a layer's predicted experts only the first so many; None: all.

    """
    return replace(DRAFTERS[drafter](r), prefetch=prefetch, prefetch_top=prefetch_top)


DRAFTERS: dict[str, Callable[[int], StepPath]] = {
    "top-r": lambda r: StepPath("draft", top_r=r),
    "draft-expert": lambda r: StepPath("draft", top_r=r, draft_experts=True),
    # The control: the whole target in the verifier's own step shape, so that every greedy draft must be accepted.
    "target": lambda r: StepPath("draft", whole_block=True),
}


class SelfDrafter:
    """Drafts with an engine's own target.

    Args:
        engine: its cache ends before the pending token.
        path: see `draft_path`.
        sampling: as for the target.
        sampler: the request's.
    """

    def __init__(self, engine: Engine, path: StepPath, sampling: Sampling, sampler: Sampler) -> None:
        self.engine, self.path, self.sampling, self.sampler = engine, path, sampling, sampler

    def propose(self, pending: int) -> Iterator[Drafted]:
        """Draft steps one after another from `pending` on, for as long as the caller asks."""
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


def until_stop(stop_ids: Collection[int], tokens: list[int]) -> list[int]:
    """The tokens up to the first that ends the answer, it included."""
    for at, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: at + 1]
    return tokens


def routing_overlap(predicted: np.ndarray, routed: np.ndarray) -> tuple[int, int]:
    """Experts that predictions and routing [L, B, k] have in common over all layers and rows, and how many were asked.

    Returns:
        (overlap, slots), slots = L B k.
    """
    same = predicted[..., :, None] == routed[..., None, :]
    return int(same.sum()), routed.size


def union_size(routing: np.ndarray, num_experts: int) -> int:
    """Layer-experts in the union over a block: routing [L, B, k] -> sum over layers of distinct ids."""
    seen = np.zeros((len(routing), num_experts), dtype=bool)
    seen[np.arange(len(routing))[:, None], routing.reshape(len(routing), -1)] = True
    return int(seen.sum())
