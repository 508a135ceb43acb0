"""Where the predictor's head begins: least squares from the backbone's output to the routed experts, in closed form.

A backbone that was trained on text, or the target's embedding alone, already tells much of the routing; a linear map
finds it in one pass over a few ten thousand tokens, where gradient steps take many.

Shapes: P tokens of a batch, H hidden size, O = L E logits of L MoE layers, k experts a token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moexp.base.progress import stage
from moexp.base.ridge import solve_ridge
from moexp.learn.predictor.data import batch_of
from moexp.learn.predictor.lesson import Lesson, Levels
from moexp.learn.predictor.loss import backbone_states, routing_loss
from moexp.runtime.predictors.learned import RoutingPredictor

RIDGE = 1e-3  # added to the diagonal, over its mean
SCALES = (1, 2, 3, 4, 6, 8, 12, 16)  # of the fitted shares, as logits


@torch.no_grad()
def fit_head(model: RoutingPredictor, lesson: Lesson, tokens: int, levels: Levels | None = None) -> int:
    """Sets the head's weights by ridge regression of the routed experts on the backbone's output; returns the tokens.

    The regression is solved after 1, 2, 3, 4, 6, 9, ... rows, as long as that is less than a batch more, and at the
    end, so that earlier, weaker heads can be saved. The last batch of rows sets the scale of the logits.

    Args:
        tokens: training tokens to fit to, at most about.
        levels: is offered every head.
    """
    model.eval()
    rows, batch = lesson.rows, lesson.batch
    order_R = np.random.default_rng(lesson.seed).permutation(lesson.train_R)
    scale_R, order_R = order_R[-batch:], order_R[:-batch] if len(order_R) > batch else order_R
    size = model.head.weight.shape[1] + 1
    gram_HH = torch.zeros(size, size, dtype=torch.float64, device=model.device)
    mixed_HO = gram_HH.new_zeros(size, model.head.weight.shape[0])
    done = seen = 0
    with stage("Expert predictor, linear start", None):
        while done < len(order_R) and seen < tokens:
            chosen_R = order_R[done : done + max(1, min(done // 2, batch))]
            part = batch_of(rows, chosen_R).to(model.device)
            hidden_PH = backbone_states(model, part, lesson.dtype)
            with_one_PH = torch.cat([hidden_PH.float(), hidden_PH.new_ones(len(hidden_PH), 1).float()], dim=1)
            gram_HH += (with_one_PH.T @ with_one_PH).double()
            mixed_HO += (with_one_PH.T @ _multi_hot(part.experts_PLk, rows.geometry.num_experts)).double()
            done, seen = done + len(chosen_R), seen + len(part.experts_PLk)
            is_last = done >= len(order_R) or seen >= tokens
            if is_last or len(chosen_R) < batch:
                solved_HO = solve_ridge(gram_HH, mixed_HO, RIDGE)
                model.head.weight.copy_(solved_HO[:-1].T)
                model.head.bias.copy_(solved_HO[-1])
                _scale_head(model, lesson, scale_R)
                if levels is not None:
                    levels.offer(model, lesson.probe(model), 0)
    return seen


def _scale_head(model: RoutingPredictor, lesson: Lesson, scale_R: np.ndarray) -> None:
    """Shares become logits: times the factor at which the loss is least. Their order stays."""
    part = batch_of(lesson.rows, scale_R).to(model.device)
    logits_PLE = model.logits(backbone_states(model, part, lesson.dtype))
    best = min(SCALES, key=lambda scale: float(routing_loss(scale * logits_PLE, part.experts_PLk)))
    model.head.weight.mul_(best)
    model.head.bias.mul_(best)


def _multi_hot(experts_PLk: Tensor, num_experts: int) -> Tensor:
    """[P, O]: 1 where an expert was routed to."""
    tokens, layers, _ = experts_PLk.shape
    return torch.zeros(tokens, layers, num_experts, device=experts_PLk.device).scatter_(2, experts_PLk, 1.0).flatten(1)
