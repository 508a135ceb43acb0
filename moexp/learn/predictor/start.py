"""Where the predictor's head begins: least squares from what the backbone says to what was routed, in closed form.

A backbone that was trained on text, or the target's embedding alone, already tells much of the routing; a linear map
finds it in one pass over a few ten thousand tokens, where gradient steps take many.

Shapes: R rows, P tokens of a batch, H hidden size, L MoE layers, E experts a layer, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moexp.base.progress import stage
from moexp.base.ridge import solve_ridge
from moexp.learn.predictor.data import RoutingBatch, RoutingRows, batch_of
from moexp.runtime.predictors.learned import RoutingPredictor

RIDGE = 1e-3  # added to the diagonal, over its mean
SCALES = (1, 2, 3, 4, 6, 8, 12, 16)  # of the fitted shares, as logits


@torch.no_grad()
def fit_head(
    model: RoutingPredictor,
    rows: RoutingRows,
    order_R: np.ndarray,
    *,
    tokens: int,
    batch: int,
    hidden: Callable[[RoutingPredictor, RoutingBatch], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    on_fit: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Sets the head's weights by ridge regression of the routed experts on the backbone's output; returns the tokens.

    The regression is solved after 1, 2, 3, 4, 6, 9, ... rows, as long as that is less than a batch more, and at the
    end, so that earlier, weaker heads can be kept.

    Args:
        order_R: training rows, in the order to take them; the last `batch` set the scale of the logits.
        tokens: to fit to, at most about.
        batch: most rows of a forward pass.
        hidden: the backbone's output [P, H] for a batch.
        loss: of logits [P, L, E] against experts [P, L, k].
        on_fit: called with the tokens so far whenever the head is set.
    """
    model.eval()
    size = model.head.weight.shape[1] + 1
    gram_HH = torch.zeros(size, size, dtype=torch.float64, device=model.device)
    mixed_HO = gram_HH.new_zeros(size, model.head.weight.shape[0])
    scale_R, order_R = order_R[-batch:], order_R[:-batch] if len(order_R) > batch else order_R
    done = seen = 0
    with stage("Expert predictor, linear start", None):
        while done < len(order_R) and seen < tokens:
            chosen = order_R[done : done + max(1, min(done // 2, batch))]
            part = batch_of(rows, chosen).to(model.device)
            with_one_PH = _with_one(hidden(model, part))
            gram_HH += (with_one_PH.T @ with_one_PH).double()
            mixed_HO += (with_one_PH.T @ _multi_hot(part.experts_PLk, rows.geometry.num_experts)).double()
            done, seen = done + len(chosen), seen + len(part.experts_PLk)
            over = done >= len(order_R) or seen >= tokens
            if over or len(chosen) < batch:
                _set_head(model, gram_HH, mixed_HO)
                _scale_head(model, batch_of(rows, scale_R).to(model.device), hidden, loss)
                on_fit(seen)
    return seen


def _set_head(model: RoutingPredictor, gram_HH: Tensor, mixed_HO: Tensor) -> None:
    solved_HO = solve_ridge(gram_HH, mixed_HO, RIDGE)
    model.head.weight.copy_(solved_HO[:-1].T)
    model.head.bias.copy_(solved_HO[-1])


def _scale_head(
    model: RoutingPredictor,
    part: RoutingBatch,
    hidden: Callable[[RoutingPredictor, RoutingBatch], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Shares become logits: times whatever makes the loss least. Their order stays."""
    logits_PLE = model.logits(hidden(model, part))
    best = min(SCALES, key=lambda scale: float(loss(scale * logits_PLE, part.experts_PLk)))
    model.head.weight.mul_(best)
    model.head.bias.mul_(best)


def _multi_hot(experts_PLk: Tensor, num_experts: int) -> Tensor:
    """[P, L * E]: 1 where an expert was routed to."""
    tokens, layers, _ = experts_PLk.shape
    return torch.zeros(tokens, layers, num_experts, device=experts_PLk.device).scatter_(2, experts_PLk, 1.0).flatten(1)


def _with_one(hidden_PH: Tensor) -> Tensor:
    return torch.cat([hidden_PH.float(), hidden_PH.new_ones(len(hidden_PH), 1).float()], dim=1)
