"""Matrix multiplications of the resident weights: fused where they share an input, packed where the CPU gains by it.

A packed weight holds the same numbers in the order that oneDNN's kernels read them. Plain weights are reordered at
every call, which for the few rows of a decoding step costs as much again as the multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Linear = Callable[[Tensor], Tensor]
"""[..., in] -> [..., out]."""


def fuse_linears(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight [sum of outs, in] (and bias) for several projections of the same input; theirs become views of it."""
    weight = torch.cat([module.weight.data for module in modules])
    biases = [module.bias.data for module in modules if module.bias is not None]
    assert len(biases) in (0, len(modules)), "either all of them have a bias or none has"
    begin = 0
    for module in modules:
        module.weight.data = weight[begin : begin + module.out_features]
        begin += module.out_features
    return weight, torch.cat(biases) if biases else None


def make_linear(weight: Tensor, bias: Tensor | None = None, *, rows: int, pack: bool) -> Linear:
    """A function x -> x weight^T + bias for inputs of about `rows` rows.

    Args:
        weight: [out, in].
        bias: [out] or None.
        rows: row count to choose a packed layout for (any other row count works too).
        pack: keep a packed copy of the weight where that is faster.
    """
    if pack and can_pack(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        op = torch.ops.mkldnn._linear_pointwise.default

        def packed_linear(x: Tensor) -> Tensor:
            return op(x, packed, bias, "none", [], "")

        return packed_linear
    return partial(F.linear, weight=weight, bias=bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN keeps a packed layout for such a weight: bf16 on a CPU that multiplies bf16."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class SwiGLU:
    """A resident feed-forward block down(silu(gate x) * up x) with one fused gate/up multiplication.

    Args:
        gate_up_2IH: [2I, H], gate rows first.
        down_HI: [H, I].
        rows, pack: as in `make_linear`.
    """

    def __init__(self, gate_up_2IH: Tensor, down_HI: Tensor, *, rows: int, pack: bool) -> None:
        self.gate_up = make_linear(gate_up_2IH, rows=rows, pack=pack)
        self.down = make_linear(down_HI, rows=rows, pack=pack)

    @classmethod
    def from_module(cls, mlp: nn.Module, *, rows: int, pack: bool) -> SwiGLU:
        """Of a transformers MLP with gate_proj, up_proj and down_proj."""
        weight, _ = fuse_linears([mlp.gate_proj, mlp.up_proj])  # type: ignore[list-item]
        return cls(weight, mlp.down_proj.weight, rows=rows, pack=pack)  # type: ignore[arg-type, union-attr]

    def __call__(self, x_TH: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TH).chunk(2, dim=-1)
        return self.down(F.silu(gate_TI) * up_TI)
