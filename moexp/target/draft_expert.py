"""DraftExpert's only trained weights: one small SwiGLU expert a MoE layer, resident, with a learned scale.

The draft path of a layer is S(h) + g_e1 E_e1(h) + gamma E_d(h): shared experts, the target's own top-1 with the
target's own gate, and the draft expert.

Shapes: T tokens, H hidden size, W width of the draft expert.

Paper: DraftExpert eq. 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moexp.target.trained import TrainedFiles

FILES = TrainedFiles(
    what="draft experts",
    weights="draft_experts.safetensors",
    header="draft_experts.json",
    format="moexp-draft-experts-1",
    command="train-draft-expert",
    missing="no draft-expert checkpoint",
)
WEIGHTS, HEADER, read_header = FILES.weights, FILES.header, FILES.read_header


class DraftExpert(nn.Module):
    """gamma times a SwiGLU of width W: [T, H] -> [T, H]. Starts at zero output unless it is initialised otherwise."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2 * width, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.zeros(hidden, width))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_TH: Tensor) -> Tensor:
        gate_TW, up_TW = F.linear(x_TH, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate_TW) * up_TW, self.down) * self.scale.to(x_TH.dtype)


class DraftExperts(nn.Module):
    """The draft experts of a target, by decoder layer."""

    def __init__(self, hidden: int, width: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.hidden, self.width, self.layers = hidden, width, layers
        self.experts = nn.ModuleDict({str(layer): DraftExpert(hidden, width) for layer in layers})

    def forward_layer(self, layer: int, x_TH: Tensor) -> Tensor:
        """The scaled output [T, H] of layer `layer`'s draft expert."""
        return self.experts[str(layer)](x_TH)


def save_draft_experts(folder: Path, experts: DraftExperts, fingerprint: str, details: dict[str, Any]) -> None:
    """Writes the checkpoint folder atomically. `details` (recipe, metrics, provenance) is for people to read."""
    geometry = {"hidden": experts.hidden, "width": experts.width, "layers": list(experts.layers)}
    FILES.save(folder, experts.state_dict(), fingerprint, geometry | details)


def load_draft_experts(folder: Path, fingerprint: str, *, dtype: torch.dtype = torch.bfloat16) -> DraftExperts:
    """Loads the draft experts of the target with this fingerprint.

    Raises:
        MoexpError: missing or damaged checkpoint, or one trained for another target.
    """
    header = FILES.header_for(folder, fingerprint)
    experts = DraftExperts(header["hidden"], header["width"], tuple(header["layers"]))
    FILES.load_into(experts, folder)
    return experts.to(dtype).requires_grad_(False)
