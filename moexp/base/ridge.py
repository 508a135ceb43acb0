"""Ridge regression from sums, which a corpus of any length is read into piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor


def solve_ridge(gram_FF: Tensor, mixed_FO: Tensor, share: float) -> Tensor:
    """The map [F, O] that takes inputs to outputs with the least squared error.

    Args:
        gram_FF: sum of the inputs' products with each other.
        mixed_FO: sum of their products with the outputs.
        share: of the mean of `gram_FF`'s diagonal, what is added to each element of it.
    """
    regular_FF = gram_FF.clone()
    regular_FF.diagonal().add_(share * gram_FF.diagonal().mean())
    return torch.linalg.solve(regular_FF, mixed_FO)
