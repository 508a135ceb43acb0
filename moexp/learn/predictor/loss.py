"""What a predictor is trained for and measured by, as functions of its logits and of the routed experts.

Shapes: B rows, T tokens, P tokens of a batch, L MoE layers, E experts a layer, k experts a token, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moexp.learn.predictor.data import RoutingBatch
from moexp.runtime.predictors.learned import RoutingPredictor


def routing_loss(logits_TLE: Tensor, experts_TLk: Tensor) -> Tensor:
    """Layer-wise cross-entropy against 1/K on each routed expert, summed over T and L.

    With q uniform over the routed experts, a term is logsumexp z - mean z_routed.

    Paper: EcoSpec eq. 5; EcoSpec eq. 6.
    """
    mean_TL = logits_TLE.gather(-1, experts_TLk).mean(-1)
    return (logits_TLE.logsumexp(-1) - mean_TL).sum()


def overlap_hits(predicted_TLk: Any, routed_TLk: Any) -> Any:
    """How many routed experts of each layer were predicted, [L]; of tensors or of arrays."""
    return (predicted_TLk[..., :, None] == routed_TLk[..., None, :]).sum((0, 2, 3))


def backbone_states(model: RoutingPredictor, part: RoutingBatch, dtype: torch.dtype) -> Tensor:
    """The backbone's output [P, H] for the live tokens; matrix products in `dtype`."""
    with _products_in(dtype, part):
        return model.hidden(part.ids_BT)[part.live_BT]


def routing_logits(model: RoutingPredictor, part: RoutingBatch, dtype: torch.dtype) -> Tensor:
    """Logits [P, L, E] of the live tokens; matrix products in `dtype`."""
    with _products_in(dtype, part):
        return model.logits(model.hidden(part.ids_BT)[part.live_BT])


def _products_in(dtype: torch.dtype, part: RoutingBatch) -> torch.autocast:
    return torch.autocast(part.ids_BT.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
