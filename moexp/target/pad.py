"""Zero-pads the routed experts of a checkpoint to a given width: the same function, with the bytes of a larger model.

A small target's experts load in microseconds; padded, each weighs what an expert of a real model does, so that
decoding from a disk is bound by the disk. Padding rows are zero in gate, up and down, so they add exactly nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moexp.base.atomic import new_folder
from moexp.base.errors import MoexpError
from moexp.target.load import PADDED_FROM, checkpoint_fingerprint

_ROUTED = re.compile(r"\.mlp\.experts\.\d+\.")
_SHARED = re.compile(r"\.mlp\.shared_experts\.")
SHARD_BYTES = 1 << 29


def pad_experts(
    source: Path, destination: Path, width: int, on_shard: Callable[[int], None] = lambda done: None
) -> None:
    """Writes to `destination` the checkpoint at `source` with expert width `width`.

    The shared experts are padded to the next multiple of `width`, which their number becomes.

    Raises:
        MoexpError: `width` is below the experts' own.
    """
    config = json.loads((source / "config.json").read_text())
    own = config["moe_intermediate_size"]
    shared = own * config.get("n_shared_experts", 0)
    if width < own:
        raise MoexpError(
            f"cannot pad experts of width {own} to {width}",
            where="target.pad_expert_width",
            valid=f">= {own}",
        )
    shared_count = -(-shared // width)
    with safe_open(source / "model.safetensors", "pt") as weights, new_folder(destination) as into:
        shard: dict[str, Tensor] = {}
        placed: dict[str, str] = {}
        size = number = 0
        for name in sorted(weights.keys()):
            tensor = weights.get_tensor(name)
            if _ROUTED.search(name):
                tensor = _padded(name, tensor, width)
            elif _SHARED.search(name):
                tensor = _padded(name, tensor, width * shared_count)
            shard[name] = tensor
            size += tensor.numel() * tensor.element_size()
            # never split an expert's three tensors over two shards: cut after its last name only
            if size > SHARD_BYTES and not name.endswith(("down_proj.weight", "gate_proj.weight")):
                number = _write_shard(into, shard, placed, number)
                on_shard(number)
                size = 0
        _write_shard(into, shard, placed, number)
        total = sum(file.stat().st_size for file in into.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (into / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        config.update({"moe_intermediate_size": width, "n_shared_experts": shared_count})
        config[PADDED_FROM] = checkpoint_fingerprint(source)
        (into / "config.json").write_text(json.dumps(config, indent=2))
        for file in source.iterdir():
            if file.suffix in {".json", ".jinja"} and not (into / file.name).exists():
                shutil.copy(file, into / file.name)


def _padded(name: str, tensor: Tensor, width: int) -> Tensor:
    """gate and up grow in rows, down in columns."""
    rows, columns = tensor.shape
    shape = (rows, width) if name.endswith("down_proj.weight") else (width, columns)
    padded = torch.zeros(shape, dtype=tensor.dtype)
    padded[:rows, :columns] = tensor
    return padded


def _write_shard(into: Path, shard: dict[str, Tensor], placed: dict[str, str], number: int) -> int:
    file = f"model-{number:05d}.safetensors"
    save_file(shard, into / file, metadata={"format": "pt"})
    placed.update(dict.fromkeys(shard, file))
    shard.clear()
    return number + 1
