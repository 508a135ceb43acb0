"""MoE blocks of a transformers model in training: how experts are computed, and hooks that watch routers.

Up to a few thousand neurons (E x I), one matmul over all experts is faster on a CPU than sorting tokens into narrow
groups, and its backward is exact: unchosen experts have gate zero.

Shapes: T tokens, H hidden size, E experts, I expert width, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moexp.target.families import family_of
from moexp.target.spec import MoESpec

MASKED_DENSE = "masked_dense"
WIDEST = 4096  # neurons (E x I) up to which dense is the faster choice


def masked_dense_forward(experts: Any, hidden_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    """The routed output [T, H] of a fused SwiGLU experts module; of another layout, by transformers' own."""
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
    """The experts implementation to train with for this geometry; registers `masked_dense` on first use."""
    if num_experts * expert_width > WIDEST:
        return "grouped_mm"
    if MASKED_DENSE not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(MASKED_DENSE, masked_dense_forward)
    return MASKED_DENSE


def set_training_experts(model: Any) -> MoESpec:
    """Sets the model to the experts implementation that suits its geometry, which it returns."""
    spec = MoESpec.from_config(model.config)
    model.set_experts_implementation(training_implementation(spec.num_experts, spec.expert_width))
    return spec


def routers(model: Any) -> dict[int, nn.Module]:
    """The router of each MoE layer: hidden states to (logits [T, E], gates [T, k], ids [T, k])."""
    name = family_of(model.config.model_type).router
    layers = MoESpec.from_config(model.config).moe_layers
    return {layer: getattr(model.model.layers[layer].mlp, name) for layer in layers}


def by_gate(gates_Tk: Tensor, ids_Tk: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and ids by descending gate; equal gates keep their order."""
    gates_Tk, order_Tk = gates_Tk.sort(dim=-1, descending=True, stable=True)
    return gates_Tk, ids_Tk.gather(-1, order_Tk)


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., Any], *, before: bool = False) -> Iterator[None]:
    """Inside, `hook(module, args, output)` runs after each forward pass of the modules; `hook(module, args)` before."""
    with ExitStack() as stack:
        for module in modules:
            handle = module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
            stack.callback(handle.remove)
        yield
