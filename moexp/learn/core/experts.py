"""An experts implementation for training many tiny experts: compute all of them densely and let the gates choose.

Where E x I is a few thousand neurons, one wide matmul over all experts is faster on a CPU than sorting tokens into
64 narrow groups, and its backward is exact: unchosen experts have gate zero. Registered with transformers under the
name `masked_dense`.

Shapes: T tokens, H hidden size, E experts, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

MASKED_DENSE = "masked_dense"
WIDEST = 4096  # neurons (E x I) up to which dense is the faster choice


def masked_dense_forward(experts: Any, hidden_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    """The routed output [T, H] of a fused SwiGLU experts module (gate_up_proj [E, 2I, H], down_proj [E, H, I]); of one
    with another layout (GPT-OSS), what transformers' grouped implementation gives.
    """
    if experts.is_transposed:
        output_TH: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden_TH, index_Tk, weight_Tk)
        return output_TH
    gate_up_EJH, down_EHI = experts.gate_up_proj, experts.down_proj
    num_experts, _, hidden = gate_up_EJH.shape
    both_TEJ = F.linear(hidden_TH, gate_up_EJH.flatten(0, 1)).unflatten(1, (num_experts, -1))
    gate_TEI, up_TEI = both_TEJ.chunk(2, dim=-1)
    gates_TE = torch.zeros(hidden_TH.shape[0], num_experts, dtype=both_TEJ.dtype, device=both_TEJ.device)
    gates_TE = gates_TE.scatter(1, index_Tk, weight_Tk.to(both_TEJ.dtype))
    active_TEI = F.silu(gate_TEI) * up_TEI * gates_TE.unsqueeze(-1)
    return F.linear(active_TEI.flatten(1), down_EHI.permute(1, 0, 2).reshape(hidden, -1))


def gated_matrices(experts: Any) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H], gate rows first, and down [E, H, I] of an experts module in any layout; biases left out."""
    if not experts.is_transposed:
        return experts.gate_up_proj, experts.down_proj
    gate_up_EJH = experts.gate_up_proj.transpose(1, 2)  # gate and up rows in turn
    return torch.cat([gate_up_EJH[:, ::2], gate_up_EJH[:, 1::2]], dim=1), experts.down_proj.transpose(1, 2)


def training_implementation(num_experts: int, expert_width: int) -> str:
    """The experts implementation to train with for this geometry; registers ours on first use."""
    if num_experts * expert_width > WIDEST:
        return "grouped_mm"
    if MASKED_DENSE not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(MASKED_DENSE, masked_dense_forward)
    return MASKED_DENSE
