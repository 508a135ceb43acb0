"""Whether the backend gives a row of a block the same bits whatever stands beside it.

Shape suffixes: T rows of a block, H input width, N heads, K keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moexp.runtime.engine.linear import make_linear
from moexp.target.load import Target

BLOCK, KEYS, DRAWS = 8, 512, 4


def row_invariant(target: Target) -> bool:
    """Whether a row of a block gets the same bits wherever it stands and whatever stands beside it.

    Probed with the target's own matrices and attention shapes on random input, apart from all code that is being
    tested.
    """
    generator = torch.Generator().manual_seed(0)
    spec, dtype = target.spec, target.dtype
    model: Any = target.model
    weights = [model.get_output_embeddings().weight, *_first_matrices(model)]
    heads = spec.num_heads
    for _ in range(DRAWS):
        for weight in weights:
            linear = make_linear(weight, rows=BLOCK, pack=True)
            x_TH = torch.randn(BLOCK, weight.shape[1], generator=generator).to(dtype)
            if not _same_rows(linear, x_TH, generator):
                return False
        keys_NKD = torch.randn(heads, KEYS, 16, generator=generator).to(dtype)

        def attend(x_TND: Tensor, keys_NKD: Tensor = keys_NKD) -> Tensor:
            out = F.scaled_dot_product_attention(x_TND.transpose(0, 1)[None], keys_NKD[None], keys_NKD[None])
            return out[0].transpose(0, 1)

        if not _same_rows(attend, torch.randn(BLOCK, heads, 16, generator=generator).to(dtype), generator):
            return False
    return True


def _first_matrices(model: Any) -> list[Tensor]:
    """Attention and feed-forward matrices of the first layer."""
    return [module.weight for module in model.model.layers[0].modules() if isinstance(module, torch.nn.Linear)]


@torch.no_grad()
def _same_rows(function: Callable[[Tensor], Tensor], x_T: Tensor, generator: torch.Generator) -> bool:
    """Moves the rows about, and replaces all but one of them: each must keep its bits."""
    y_T = function(x_T)
    order = torch.randperm(len(x_T), generator=generator)
    if not torch.equal(function(x_T[order]), y_T[order]):
        return False
    alone_T = x_T[:1].expand_as(x_T).contiguous()
    return torch.equal(function(alone_T)[0], y_T[0])
