"""MTP heads on disk: the layer inside a DeepSeek-V3-style checkpoint, and heads trained here.

Such a checkpoint keeps the head behind its last decoder layer, as model.layers.{num_hidden_layers}.*: enorm, hnorm,
eh_proj, a decoder layer, shared_head.norm, and copies of the embedding and of the output projection, which the target
has already. transformers drops these tensors when it loads a target, so they are read from the shards.

A head trained here is a folder of `mtp_head.safetensors` and `mtp_head.json`, which names its target.

Shape suffixes: E experts, I expert width, H hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moexp.base.atomic import new_folder
from moexp.base.errors import MoexpError
from moexp.target.heads.head_files import Entry, check_names, list_tensors, read_json, read_tensors
from moexp.target.heads.mtp_head import MtpHead, decoder_layer, shared_parts

WEIGHTS, HEADER = "mtp_head.safetensors", "mtp_head.json"
FORMAT = "moexp-mtp-head-1"
WHAT = "an MTP head"
SHARED_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
FP32 = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")  # transformers keeps routers in fp32
_EXPERT = re.compile(r"layer\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")


def load_mtp_layer(folder: Path | str, model: Any, *, depth: int = 0, dtype: torch.dtype = torch.bfloat16) -> MtpHead:
    """Loads the MTP head that a checkpoint carries, from the shards that hold it.

    Args:
        folder: the target's checkpoint.
        model: the target, for the parts that the head shares with it; its experts may be on `meta`.
        depth: which head, where there are several (DeepSeek-V3 has one).
        dtype: to compute in. A router stays in fp32.

    Raises:
        MoexpError: the config promises no such head, or the checkpoint does not hold it, or holds another's.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", what="a Hugging Face checkpoint folder")
    promised = int(config.get("num_nextn_predict_layers") or 0)
    if not 0 <= depth < promised:
        raise MoexpError(
            f"MTP head {depth} of a checkpoint with num_nextn_predict_layers {promised}",
            where=str(folder / "config.json"),
            valid=f"0 to {promised - 1}" if promised else "a checkpoint with an MTP layer, such as DeepSeek-V3's",
        )
    prefix = f"model.layers.{model.config.num_hidden_layers + depth}."
    entries = {_own_name(name, prefix): entry for name, entry in list_tensors(folder, prefix).items()}
    if not entries:
        raise MoexpError(
            f"the config promises {promised} MTP layers, but there is no tensor {prefix}*",
            where=str(folder),
            valid="a checkpoint that still has its MTP layer (transformers drops it on saving)",
        )
    for name in SHARED_COPIES:
        entries.pop(name, None)
    dense = not any(_EXPERT.fullmatch(name) for name in entries)
    head = MtpHead(model.config, shared_parts(model), decoder_layer(model.config, dense=dense))
    _check_layer(head, entries, folder, prefix)

    tensors = read_tensors(entries, [name for name in entries if not name.endswith(FP32)], dtype)
    tensors |= read_tensors(entries, [name for name in entries if name.endswith(FP32)], torch.float32)
    head.load_state_dict(_fuse_experts(tensors), assign=True)
    return head.to(model.get_input_embeddings().weight.device).eval().requires_grad_(False)


def save_mtp_head(folder: Path, head: MtpHead, fingerprint: str, details: dict[str, Any] | None = None) -> None:
    """Writes a head trained here, atomically. `details` (recipe, metrics, provenance) is for people to read."""
    header = {
        "format": FORMAT,
        "target": fingerprint,
        "hidden": head.hidden,
        "dense": is_dense(head),
        **(details or {}),
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    with new_folder(folder) as temp:
        save_file(tensors, temp / WEIGHTS)
        (temp / HEADER).write_text(json.dumps(header, indent=2) + "\n")


def load_mtp_head(folder: Path | str, model: Any, fingerprint: str, *, dtype: torch.dtype = torch.bfloat16) -> MtpHead:
    """Loads a head trained here.

    Raises:
        MoexpError: missing or damaged files, or a head of another target.
    """
    folder = Path(folder)
    header = read_json(folder / HEADER, what="a folder written by `moexp train-drafter`")
    if header.get("format") != FORMAT:
        raise MoexpError(f"unknown format {header.get('format')!r}", where=str(folder / HEADER), valid=FORMAT)
    if header.get("target") != fingerprint:
        raise MoexpError(
            f"an MTP head of target {str(header.get('target'))[:12]}, but the target is {fingerprint[:12]}",
            where=str(folder),
            valid="a head trained on this very target",
        )
    head = MtpHead(model.config, shared_parts(model), decoder_layer(model.config, dense=bool(header.get("dense"))))
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise MoexpError(
            f"damaged weights: {str(error).splitlines()[0]}", where=str(folder / WEIGHTS), valid="train again"
        ) from error
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_names(_shapes(head), found, where=str(folder / WEIGHTS), what=WHAT)
    cast = {name: tensor.to(torch.float32 if name.endswith(FP32) else dtype) for name, tensor in tensors.items()}
    head.load_state_dict(cast, assign=True)
    return head.to(model.get_input_embeddings().weight.device).eval().requires_grad_(False)


def is_dense(head: MtpHead) -> bool:
    """Whether the head's decoder layer has no experts."""
    layer: Any = head.layer
    return not hasattr(layer.mlp, "experts")


def _own_name(name: str, prefix: str) -> str:
    """A checkpoint's name as the head's: what is not the projection's or the norms' belongs to the decoder layer."""
    rest = name.removeprefix(prefix)
    return rest if rest.startswith(_OWN) or rest in SHARED_COPIES else f"layer.{rest}"


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _check_layer(head: MtpHead, entries: Mapping[str, Entry], folder: Path, prefix: str) -> None:
    """The checkpoint's tensors must be the head's, its fused experts spelled out one by one."""
    expected = _shapes(head)
    fused = expected.pop("layer.mlp.experts.gate_up_proj", None)
    down = expected.pop("layer.mlp.experts.down_proj", None)
    if fused is not None and down is not None:
        for expert in range(fused[0]):
            name = f"layer.mlp.experts.{expert}."
            expected |= {f"{name}{part}_proj.weight": (fused[1] // 2, fused[2]) for part in ("gate", "up")}
            expected[f"{name}down_proj.weight"] = down[1:]
    found = {name: entry.shape for name, entry in entries.items()}
    check_names(expected, found, where=f"{folder}, {prefix}*", what=WHAT)


def _fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state that the head's modules hold: experts stacked, gate rows first."""
    experts: dict[tuple[int, str], Tensor] = {}
    state: dict[str, Tensor] = {}
    for name in list(tensors):
        match = _EXPERT.fullmatch(name)
        if match:
            experts[int(match[1]), match[2]] = tensors.pop(name)
        else:
            state[name] = tensors.pop(name)
    if experts:
        numbers = sorted({number for number, _ in experts})
        state["layer.mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([experts[number, "gate"], experts[number, "up"]]) for number in numbers]
        )
        state["layer.mlp.experts.down_proj"] = torch.stack([experts[number, "down"] for number in numbers])
    return state
