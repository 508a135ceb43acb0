"""Small checkpoints with routed experts, for the tests of indexes and stores."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moexp.target.families import FAMILIES

NAMES = FAMILIES["glm4_moe"].tensors
APART = {  # sorted by name, the gate lies before and the up matrix behind the down matrix
    "gate": "model.layers.{layer}.moe.experts.{expert}.w1.weight",
    "up": "model.layers.{layer}.moe.experts.{expert}.w3.weight",
    "down": "model.layers.{layer}.moe.experts.{expert}.w2.weight",
}
TORCH_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


def expert_tensors(
    layers: int = 2, experts: int = 4, width: int = 24, hidden: int = 40, dtype=torch.float32, names=NAMES
) -> dict[str, Tensor]:
    """Random routed experts of layers 1 to `layers`, and some other tensors between them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(7, hidden, generator=generator).to(dtype)}
    for layer in range(1, layers + 1):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(hidden, dtype=dtype)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(experts, hidden, generator=generator)
        for expert in range(experts):
            for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                name = names[part].format(layer=layer, expert=expert)
                tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


def save_shards(
    folder: Path, tensors: dict[str, Tensor], shards: int = 1, shard_of: Callable[[int], int] | None = None
) -> Path:
    """Save as one file, or as several with an index; tensors go round the shards, or where `shard_of` puts the n-th."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "glm4_moe"}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    place = shard_of or (lambda number: number * shards // len(tensors))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = {name: tensor for number, (name, tensor) in enumerate(sorted(tensors.items())) if place(number) == shard}
        save_file(mine, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def save_in_order(folder: Path, tensors: dict[str, Tensor], start: int = 0) -> Path:
    """One file with the tensors in the order given and `start` stray bytes (a tensor of their own) before them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "glm4_moe"}))
    header, body = {}, bytearray()
    if start:
        tensors = {"stray": torch.zeros(start, dtype=torch.uint8), **tensors}
    for name, tensor in tensors.items():
        begin = len(body)
        body += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": TORCH_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(body)],
        }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


def expected(tensors: dict[str, Tensor], layer: int, expert: int, names=NAMES) -> tuple[Tensor, Tensor]:
    """(gate_up [2I, H], down [H, I]) of one expert."""
    parts = {part: tensors[name.format(layer=layer, expert=expert)] for part, name in names.items()}
    return torch.cat([parts["gate"], parts["up"]]), parts["down"]
