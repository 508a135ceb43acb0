"""MTP heads on disk: the layer inside a DeepSeek-V3-style checkpoint, and heads trained here.

Such a checkpoint keeps the head behind its last decoder layer, as model.layers.{num_hidden_layers}.*: enorm, hnorm,
eh_proj, a decoder layer, shared_head.norm, and copies of the embedding and of the output projection, which the target
has already. transformers drops these tensors when it loads a target, so they are read from the shards.

A head trained here is a folder of `mtp_head.safetensors` and `mtp_head.json`, which names its target.

Shape suffixes: E experts, I expert width, H hidden size.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.target.coding import SCALE, fp8_block
from moexp.target.heads.mtp_head import MtpHead, decoder_layer, shared_parts
from moexp.target.shards import check_names, list_tensors, read_tensors, shapes_of
from moexp.target.trained import TrainedFiles, read_json

WHAT = "an MTP head"
FILES = TrainedFiles(WHAT, "mtp_head.safetensors", "mtp_head.json", "moexp-mtp-head-1", "train-drafter")
WEIGHTS, HEADER = FILES.weights, FILES.header
SHARED_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
FP32 = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")  # transformers keeps routers in fp32
_EXPERT = re.compile(r"layer\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")


def load_mtp_layer(folder: Path | str, model: Any, *, dtype: torch.dtype = torch.bfloat16) -> MtpHead:
    """Loads the MTP head that a checkpoint carries, from the shards that hold it; FP8 in blocks is dequantised.

    Args:
        folder: the target's checkpoint.
        model: the target, for the parts that the head shares with it; its experts may be on `meta`.
        dtype: to compute in. A router stays in fp32.

    Raises:
        MoexpError: the config promises no such head, or the checkpoint does not hold it, or holds another's.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", valid="a Hugging Face checkpoint folder")
    promised = int(config.get("num_nextn_predict_layers") or 0)
    if not promised:
        what = "no MTP layer in a checkpoint with num_nextn_predict_layers 0"
        valid = "a checkpoint with an MTP layer, such as DeepSeek-V3's"
        raise MoexpError(what, where=str(folder / "config.json"), valid=valid)
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    entries = {_own_name(name, prefix): entry for name, entry in list_tensors(folder, prefix).items()}
    if not entries:
        what = f"the config promises {promised} MTP layers, but there is no tensor {prefix}*"
        valid = "a checkpoint that still has its MTP layer (transformers drops it on saving)"
        raise MoexpError(what, where=str(folder), valid=valid)
    names = [name for name in entries if name not in SHARED_COPIES and not name.endswith(SCALE)]
    dense = not any(_EXPERT.fullmatch(name) for name in names)
    head = MtpHead(model.config, shared_parts(model), decoder_layer(model.config, dense=dense))
    stored = shapes_of({name: entries[name] for name in names})
    check_names(_stored_shapes(head), stored, where=f"{folder}, {prefix}*", what=WHAT)

    quantised = config.get("quantization_config")
    block = fp8_block(quantised) if quantised else None
    tensors = read_tensors(entries, names, lambda name: _computed_in(name, dtype), fp8_block=block)
    return _ready(head, _fuse_experts(tensors), model)


def save_mtp_head(folder: Path, head: MtpHead, fingerprint: str, details: dict[str, Any] | None = None) -> None:
    """Writes a head trained here, atomically. `details` (recipe, metrics, provenance) is for people to read."""
    geometry = {"hidden": head.hidden, "dense": is_dense(head)}
    FILES.save(folder, head.state_dict(), fingerprint, geometry | (details or {}))


def load_mtp_head(folder: Path | str, model: Any, fingerprint: str, *, dtype: torch.dtype = torch.bfloat16) -> MtpHead:
    """Loads a head trained here.

    Raises:
        MoexpError: missing or damaged files, or a head of another target.
    """
    folder = Path(folder)
    header = FILES.header_for(folder, fingerprint)
    head = MtpHead(model.config, shared_parts(model), decoder_layer(model.config, dense=bool(header.get("dense"))))
    tensors = FILES.tensors(folder)
    check_names(shapes_of(head.state_dict()), shapes_of(tensors), where=str(folder / WEIGHTS), what=WHAT)
    return _ready(head, {name: tensor.to(_computed_in(name, dtype)) for name, tensor in tensors.items()}, model)


def is_dense(head: MtpHead) -> bool:
    """Whether the head's decoder layer has no experts."""
    layer: Any = head.layer
    return not hasattr(layer.mlp, "experts")


def _ready(head: MtpHead, state: dict[str, Tensor], model: Any) -> MtpHead:
    head.load_state_dict(state, assign=True)
    return head.to(model.get_input_embeddings().weight.device).eval().requires_grad_(False)


def _computed_in(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(FP32) else dtype


def _own_name(name: str, prefix: str) -> str:
    """A checkpoint's name as the head's: what is not the projection's or the norms' belongs to the decoder layer."""
    rest = name.removeprefix(prefix)
    return rest if rest.startswith(_OWN) or rest in SHARED_COPIES else f"layer.{rest}"


def _stored_shapes(head: MtpHead) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors: the head's, its fused experts spelled out one by one."""
    shapes = shapes_of(head.state_dict())
    gate_up = shapes.pop("layer.mlp.experts.gate_up_proj", None)
    down = shapes.pop("layer.mlp.experts.down_proj", None)
    if gate_up is not None and down is not None:
        for expert in range(gate_up[0]):
            name = f"layer.mlp.experts.{expert}."
            shapes |= {f"{name}{part}_proj.weight": (gate_up[1] // 2, gate_up[2]) for part in ("gate", "up")}
            shapes[f"{name}down_proj.weight"] = down[1:]
    return shapes


def _fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state that the head's modules hold: experts stacked, gate rows first. Empties `tensors`."""
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
        gate_up = [torch.cat([experts.pop((n, "gate")), experts.pop((n, "up"))]) for n in numbers]
        state["layer.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        state["layer.mlp.experts.down_proj"] = torch.stack([experts.pop((n, "down")) for n in numbers])
    return state
