"""Where a draft expert starts: as the routed neurons that matter most beyond top-1.

Shapes: T tokens, H hidden size, W width of a draft expert, E experts, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moexp.learn.core.experts import by_gate, gated_matrices, hooked
from moexp.learn.draft_expert.path import DraftPath
from moexp.target.draft_expert import DraftExperts


@torch.no_grad()
def start_from_neurons(path: DraftPath, experts: DraftExperts, rows_BL: Tensor) -> None:
    """Copies neurons of the routed experts into the draft experts, in place.

    A neuron n of expert e contributes g_e a_n d_n where e is chosen but not first. The draft expert takes the W
    neurons of most energy, and scales each down column by the least-squares factor sum(g a^2) / sum(a^2) that best
    stands in for the gate.
    """
    blocks = {layer: path.model.model.layers[layer].mlp for layer in experts.layers}
    inputs: dict[nn.Module, Tensor] = {}

    def capture(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[block] = args[0].flatten(0, 1)

    with hooked(blocks.values(), capture, before=True):
        path.model.model(input_ids=rows_BL.long().to(path.model.device), use_cache=False)
    for layer, block in blocks.items():
        hidden_TH = inputs.pop(block)
        gate_up_EJH, down_EHI = gated_matrices(getattr(block, path.family.experts))
        _, weight_Tk, index_Tk = getattr(block, path.family.router)(hidden_TH)
        weight_Tk, index_Tk = by_gate(weight_Tk, index_Tk)
        weight_Tk[:, 0] = 0.0  # the draft path has the top-1 expert already
        gates_TE = weight_Tk.new_zeros(len(hidden_TH), path.spec.num_experts, dtype=torch.float32)
        gates_TE.scatter_(1, index_Tk, weight_Tk.float())
        energy_EI, factor_EI = [], []
        for expert in range(path.spec.num_experts):
            gate_TI, up_TI = F.linear(hidden_TH, gate_up_EJH[expert]).float().chunk(2, dim=-1)
            square_TI = (F.silu(gate_TI) * up_TI).square()
            gated_I = gates_TE[:, expert] @ square_TI
            factor_EI.append(gated_I / square_TI.sum(0).clamp_min(1e-12))
            energy_EI.append(gates_TE[:, expert].square() @ square_TI * down_EHI[expert].float().square().sum(0))
        best_W = torch.stack(energy_EI).flatten().argsort(descending=True, stable=True)[: experts.width]
        gate_up_E2IH = gate_up_EJH.unflatten(1, (2, -1))
        draft: Any = experts.experts[str(layer)]
        count = len(best_W)
        draft.gate_up[:count] = gate_up_E2IH[:, 0].flatten(0, 1)[best_W].float()
        draft.gate_up[experts.width : experts.width + count] = gate_up_E2IH[:, 1].flatten(0, 1)[best_W].float()
        down_NH = down_EHI.transpose(1, 2).flatten(0, 1)[best_W].float()
        draft.down[:, :count] = (down_NH * torch.stack(factor_EI).flatten()[best_W][:, None]).T
