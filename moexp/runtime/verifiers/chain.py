"""Which drafted tokens stand: greedy matching at T = 0, chain speculative sampling at T > 0 (Leviathan et al., 2023).

Pure functions of logits and probabilities. Output follows the target's distribution exactly, whatever the drafter.

Shape suffixes: V vocabulary, D drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moexp.base.errors import MoexpError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits; applied to the target and to the draft alike.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens (0: all).
        top_p: keep the smallest set of most likely tokens whose probability reaches it (1: all).
        seed: of the draws of a request.

    Raises:
        MoexpError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise MoexpError(f"temperature {self.temperature}", where="decode.temperature", valid="from 0")
        if self.top_k < 0:
            raise MoexpError(f"top_k {self.top_k}", where="decode.top_k", valid="from 0")
        if not 0 < self.top_p <= 1:
            raise MoexpError(f"top_p {self.top_p}", where="decode.top_p", valid="above 0, up to 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """fp64 distribution [..., V] that `sampling` draws from: temperature, then top-k, then top-p, renormalised.

    Greedy sampling gives all probability to the largest logit (the lowest id on a tie).
    """
    logits_V = logits_V.double()
    if sampling.greedy:
        return torch.zeros_like(logits_V).scatter_(-1, logits_V.argmax(-1, keepdim=True), 1.0)
    probs_V = (logits_V / sampling.temperature).softmax(-1)
    vocab = probs_V.shape[-1]
    cut_k = 0 < sampling.top_k < vocab
    if cut_k or sampling.top_p < 1:
        # A stable sort: of equally likely tokens those with lower ids stay, in draft and target alike.
        sorted_V, order_V = probs_V.sort(dim=-1, descending=True, stable=True)
        if cut_k:
            sorted_V[..., sampling.top_k :] = 0
            sorted_V /= sorted_V.sum(-1, keepdim=True)
        if sampling.top_p < 1:
            before_V = sorted_V.cumsum(-1) - sorted_V
            sorted_V[before_V >= sampling.top_p] = 0
        probs_V = torch.zeros_like(probs_V).scatter_(-1, order_V, sorted_V)
    return probs_V / probs_V.sum(-1, keepdim=True)


def draw(probs_V: Tensor, uniform: float) -> int:
    """The token at `uniform` (in [0, 1)) of the cumulative distribution; never one of probability 0."""
    cumulative_V = probs_V.cumsum(-1)
    at = int(torch.searchsorted(cumulative_V, uniform * float(cumulative_V[-1]), right=True))
    if at < len(probs_V) and probs_V[at] > 0:
        return at
    return int(probs_V.nonzero()[-1])  # rounding at the upper end


class Sampler:
    """Seeded draws of one request: uniform numbers from its own generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def draw(self, probs_V: Tensor) -> int:
        """A token of the distribution."""
        return draw(probs_V.cpu(), self.uniform())

    def flip(self, probability: float) -> bool:
        """True with this probability."""
        return self.uniform() < probability


@dataclass(frozen=True)
class Verdict:
    """Tokens of a block that stand.

    Attributes:
        accepted: leading drafted tokens that were accepted.
        bonus: the target's own token behind them.
    """

    accepted: int
    bonus: int


def verify_greedy(draft: Sequence[int], target: Sequence[int]) -> Verdict:
    """Accept while the drafted token is the target's own.

    Args:
        draft: D drafted tokens.
        target: D + 1 target tokens: target[i] is what the target says where draft[i] was proposed.
    """
    assert len(target) == len(draft) + 1
    accepted = 0
    while accepted < len(draft) and draft[accepted] == target[accepted]:
        accepted += 1
    return Verdict(accepted, target[accepted])


def accept_probability(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """min(1, p/q) of a token drawn from q."""
    return min(1.0, float(p_V[token]) / float(q_V[token]))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """max(p - q, 0) renormalised: what is drawn from after a rejection."""
    left_V = (p_V - q_V).clamp_min(0)
    total = float(left_V.sum())
    # p = q up to rounding: nothing is ever rejected but by rounding, and then p itself is right.
    return left_V / total if total > 0 else p_V


def verify_sampled(
    draft: Sequence[int],
    q_DV: Sequence[Tensor],
    p_DV: Sequence[Tensor] | Tensor,
    flip: Callable[[float], bool],
    draw_from: Callable[[Tensor], int],
) -> Verdict:
    """Chain speculative sampling.

    Args:
        draft: D tokens, draft[i] drawn from q_DV[i].
        q_DV: D draft distributions.
        p_DV: D + 1 target distributions; p_DV[i] given the prompt and draft[:i].
        flip: True with the given probability.
        draw_from: draws from a distribution.

    Returns:
        tokens whose joint distribution is that of drawing from the target one by one.
    """
    assert len(p_DV) == len(draft) + 1 == len(q_DV) + 1
    for i, token in enumerate(draft):
        if not flip(accept_probability(p_DV[i], q_DV[i], token)):
            return Verdict(i, draw_from(residual(p_DV[i], q_DV[i])))
    return Verdict(len(draft), draw_from(p_DV[len(draft)]))
