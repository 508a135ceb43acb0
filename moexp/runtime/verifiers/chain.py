"""Verification of a draft chain: greedy matching at T = 0, speculative sampling at T > 0.

Shape suffixes: V vocabulary, D drafted tokens, B rows of the block: the pending token and the drafted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moexp.runtime.verifiers.sampling import Sampler, Sampling, probabilities


@dataclass(frozen=True)
class Verdict:
    """Tokens of a block that stand.

    Attributes:
        path: accepted rows of the block, the pending token's (0) first: their keys and values stay.
        bonus: the target's own token behind them.
    """

    path: tuple[int, ...]
    bonus: int

    @classmethod
    def of_chain(cls, accepted: int, bonus: int) -> Verdict:
        """The verdict on a chain whose first `accepted` drafted tokens stand."""
        return cls(tuple(range(accepted + 1)), bonus)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return len(self.path) - 1

    def tokens(self, block: Sequence[int]) -> list[int]:
        """What is emitted: the path's tokens of the block behind the pending one, then the bonus."""
        return [*(block[row] for row in self.path[1:]), self.bonus]


def verify_chain(
    draft: Sequence[int], q_DV: Sequence[Tensor], logits_BV: Tensor, sampling: Sampling, sampler: Sampler
) -> Verdict:
    """Verify by the target's logits: greedily, or sampled from what `sampling` makes of them.

    Args:
        draft: D drafted tokens.
        q_DV: distributions that they were drawn from; not used when greedy.
        logits_BV: of the target, behind the pending token and each drafted one.
        sampling: temperature, top-k and top-p, applied to the target.
        sampler: the request's; not used when greedy.
    """
    if sampling.greedy:
        return verify_greedy(draft, logits_BV.argmax(-1).tolist())
    return verify_sampled(draft, q_DV, probabilities(logits_BV, sampling), sampler.flip, sampler.draw)


def verify_greedy(draft: Sequence[int], target: Sequence[int]) -> Verdict:
    """Accept while the drafted token is the target's own.

    Args:
        draft: D drafted tokens.
        target: D + 1 target tokens: target[i] is the target's token where draft[i] was proposed.
    """
    assert len(target) == len(draft) + 1
    accepted = 0
    while accepted < len(draft) and draft[accepted] == target[accepted]:
        accepted += 1
    return Verdict.of_chain(accepted, target[accepted])


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """max(p - q, 0) renormalised: what is drawn from after a rejection."""
    rest_V = (p_V - q_V).clamp_min(0)
    total = float(rest_V.sum())
    # p = q up to rounding: nothing is ever rejected but by rounding, and then p itself is right.
    return rest_V / total if total > 0 else p_V


def verify_sampled(
    draft: Sequence[int],
    q_DV: Sequence[Tensor],
    p_DV: Sequence[Tensor] | Tensor,
    flip: Callable[[float], bool],
    draw_from: Callable[[Tensor], int],
) -> Verdict:
    """Chain speculative sampling (Leviathan et al., 2023): a token is accepted with probability min(1, p/q).

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
        if not flip(min(1.0, float(p_DV[i][token]) / float(q_DV[i][token]))):
            return Verdict.of_chain(i, draw_from(residual(p_DV[i], q_DV[i])))
    return Verdict.of_chain(len(draft), draw_from(p_DV[len(draft)]))
