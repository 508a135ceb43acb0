"""The objective of draft experts (DraftExpert, equations 7 to 11); equations 8 and 9 are `core.logit_loss`.

Shapes: T tokens, H hidden size, E experts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from moexp.base import ranks
from moexp.learn.core.logit_loss import logit_loss
from moexp.learn.core.loop import Metrics

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Weights:
    """Weights of the terms of equation 11; 0 switches a term off. `temperature` is equation 8's T."""

    logit: float = 1.0
    token: float = 0.1
    residual: float = 0.1
    router: float = 0.1
    temperature: float = 1.0


@dataclass
class LayerLosses:
    """Equations 7 and 10 of one draft pass, means over tokens, summed over layers."""

    residual: Tensor
    router: Tensor


def residual_loss(draft_TH: Tensor, residual_TH: Tensor) -> Tensor:
    """Mean over tokens of |draft - residual|^2, each relative to a robust mean of its own power and the batch's.

    The equation has no division; with it one weight serves all layers, and tokens with huge activations do not drown
    the others.

    Paper: DraftExpert eq. 7.
    """
    residual_TH = residual_TH.float()
    power_T = residual_TH.square().sum(-1)
    error_T = (draft_TH.float() - residual_TH).square().sum(-1)
    median = ranks.concatenated(power_T).median()
    return (error_T / (power_T + median + 1e-12)).mean() * 2


def router_loss(target_logits_TE: Tensor, draft_logits_TE: Tensor, scoring: Scoring) -> Tensor:
    """KL of the draft path's routing distribution from the target's, the mean over tokens.

    Paper: DraftExpert eq. 10.
    """
    log_p_TE = router_distribution(target_logits_TE, scoring)
    log_q_TE = router_distribution(draft_logits_TE, scoring)
    return (log_p_TE.exp() * (log_p_TE - log_q_TE)).sum(-1).mean()


def router_distribution(logits_TE: Tensor, scoring: Scoring) -> Tensor:
    """R_l of equation 10 as log-probabilities [T, E]: softmax, or sigmoid scores normalised to one."""
    if scoring == "softmax":
        return logits_TE.float().log_softmax(-1)
    log_score_TE = nn.functional.logsigmoid(logits_TE.float())
    return log_score_TE - log_score_TE.logsumexp(-1, keepdim=True)


def draft_expert_loss(
    draft_TH: Tensor, target_TH: Tensor, head_VH: Tensor, sums: LayerLosses, layers: int, weights: Weights
) -> tuple[Tensor, Metrics]:
    """The weighted sum of all terms, a mean over tokens and layers, and the terms as metrics.

    `draft_TH` and `target_TH` are final hidden states, after the last norm; `sums` is over so many `layers`.

    Paper: DraftExpert eq. 11.
    """
    result = logit_loss(
        draft_TH.to(head_VH.dtype),
        target_TH,
        head_VH,
        head_VH,
        kl_weight=weights.logit,
        token_weight=weights.token,
        temperature=weights.temperature,
    )
    loss = result.loss / result.tokens
    loss = loss + weights.residual * sums.residual / layers + weights.router * sums.router / layers
    return loss, {
        "loss": float(loss.detach()),
        "kl": result.kl / result.tokens,
        "nll": result.nll / result.tokens,
        "agreement": result.agree / result.tokens,
        "residual": float(sums.residual.detach()) / layers,
        "router": float(sums.router.detach()) / layers,
    }
