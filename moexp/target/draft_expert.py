"""DraftExpert's only trained weights: one small SwiGLU expert a MoE layer, resident, with a learned scale.

The draft path of a layer is S(h) + g_e1 E_e1(h) + gamma E_d(h) (equation 5): shared experts, the target's own top-1
with the target's own gate, and the draft expert. A checkpoint is a folder of `draft_experts.safetensors` and
`draft_experts.json`, which names the target it belongs to.

Shapes: T tokens, H hidden size, W width of the draft expert.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moexp.base.atomic import new_folder
from moexp.base.errors import MoexpError

WEIGHTS, HEADER = "draft_experts.safetensors", "draft_experts.json"
FORMAT = "moexp-draft-experts-1"


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

    def resident_bytes(self) -> int:
        """Bytes the draft experts add to the accelerator."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())


def save_draft_experts(folder: Path, experts: DraftExperts, fingerprint: str, details: dict[str, Any]) -> None:
    """Writes the checkpoint folder atomically. `details` (recipe, metrics, provenance) is kept for reading by
    people.
    """
    header = {
        "format": FORMAT,
        "target": fingerprint,
        "hidden": experts.hidden,
        "width": experts.width,
        "layers": list(experts.layers),
        **details,
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in experts.state_dict().items()}
    with new_folder(folder) as temp:
        save_file(tensors, temp / WEIGHTS)
        (temp / HEADER).write_text(json.dumps(header, indent=2) + "\n")


def read_header(folder: Path) -> dict[str, Any]:
    """The checkpoint's JSON header.

    Raises:
        MoexpError: not a draft-expert checkpoint.
    """
    try:
        header: dict[str, Any] = json.loads((folder / HEADER).read_text())
    except (OSError, ValueError) as error:
        raise MoexpError(
            "no draft-expert checkpoint",
            where=str(folder),
            valid="a folder written by `moexp train-draft-expert`",
        ) from error
    if header.get("format") != FORMAT:
        raise MoexpError(f"unknown format {header.get('format')!r}", where=str(folder / HEADER), valid=FORMAT)
    return header


def load_draft_experts(folder: Path, fingerprint: str, *, dtype: torch.dtype = torch.bfloat16) -> DraftExperts:
    """Loads the draft experts of the target with this fingerprint.

    Raises:
        MoexpError: missing or damaged checkpoint, or one trained for another target.
    """
    header = read_header(folder)
    if header["target"] != fingerprint:
        raise MoexpError(
            f"draft experts of target {header['target'][:12]}, but the target is {fingerprint[:12]}",
            where=str(folder),
            valid="draft experts trained on this very target",
        )
    experts = DraftExperts(header["hidden"], header["width"], tuple(header["layers"]))
    try:
        experts.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise MoexpError(
            f"damaged weights: {str(error).splitlines()[0]}", where=str(folder / WEIGHTS), valid="train again"
        ) from error
    return experts.to(dtype).requires_grad_(False)
