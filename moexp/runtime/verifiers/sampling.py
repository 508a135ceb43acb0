"""How tokens are drawn from logits: temperature, top-k, top-p, and seeded draws. Shape suffix: V vocabulary."""

from __future__ import annotations

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
    token = int(torch.searchsorted(cumulative_V, uniform * float(cumulative_V[-1]), right=True))
    if token < len(probs_V) and probs_V[token] > 0:
        return token
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
