"""Expert predictors on disk: a folder of `predictor.safetensors` and `predictor.json`, which names its target.

The target's embedding is not in it: it is read from the target, and the two belong together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

from moexp.base.atomic import write_json, writing
from moexp.base.errors import MoexpError
from moexp.data.traces import RoutingGeometry
from moexp.runtime.predictors.backbone import Backbone
from moexp.runtime.predictors.learned import RoutingPredictor
from moexp.target.experts import checkpoint_files

WEIGHTS, HEADER = "predictor.safetensors", "predictor.json"
FORMAT = "moexp-expert-predictor-1"
MADE_BY = "a folder written by `moexp train-predictor`"
NOT_KEPT = ("transformers_version", "auto_map", "architectures", "_name_or_path", "dtype")
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")


def write_predictor(
    folder: Path, model: RoutingPredictor, target: str, details: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes a predictor into `folder`, the header last: without it there is no predictor.

    Args:
        target: the target's identity (`moexp.target.load.target_identity`).
        details: tokenizer, recipe, metrics, provenance; for reading.
        dtype: of the weights on disk.
    """
    tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    config = json.loads(model.backbone.config.to_json_string(use_diff=True))
    geometry = model.geometry
    header = {
        "format": FORMAT,
        "target": target,
        "layers": list(geometry.layers),
        "num_experts": geometry.num_experts,
        "top_k": geometry.top_k,
        "context": model.context,
        "backbone": {key: value for key, value in config.items() if key not in NOT_KEPT},
        **details,
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS)
    write_json(folder / HEADER, header)


def read_header(folder: Path) -> dict[str, Any]:
    """A predictor's header.

    Raises:
        MoexpError: not a predictor.
    """
    try:
        header: dict[str, Any] = json.loads((folder / HEADER).read_text())
    except (OSError, ValueError) as error:
        raise MoexpError("no expert predictor", where=str(folder), valid=MADE_BY) from error
    if header.get("format") != FORMAT:
        raise MoexpError(f"unknown format {header.get('format')!r}", where=str(folder / HEADER), valid=FORMAT)
    return header


def load_predictor(
    folder: Path, target: str, embedding_VD: Tensor, *, dtype: torch.dtype = torch.float32
) -> RoutingPredictor:
    """The predictor of the target with this identity, frozen.

    Args:
        embedding_VD: the target's.
        dtype: to compute in.

    Raises:
        MoexpError: missing or damaged, or trained for another target.
    """
    header = read_header(folder)
    if header["target"] != target:
        raise MoexpError(
            f"a predictor of target {header['target'][:12]}, but the target is {target[:12]}",
            where=str(folder),
            valid="a predictor trained on this very target",
        )
    geometry = RoutingGeometry.from_json(header)
    try:
        config = AutoConfig.for_model(**header["backbone"])
        backbone = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model = RoutingPredictor(Backbone(backbone), embedding_VD, geometry, context=header["context"])
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise MoexpError(
            f"damaged predictor: {str(error).splitlines()[0]}", where=str(folder / WEIGHTS), valid="train again"
        ) from error
    return model.cast(dtype).eval().requires_grad_(False)


def target_embedding(folder: Path) -> Tensor:
    """The input embedding [V, D] of a checkpoint, and nothing else of it.

    Raises:
        MoexpError: no shard has one.
    """
    for file in checkpoint_files(folder):
        with safe_open(file, "pt") as shard:
            for name in EMBEDDINGS:
                if name in shard.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                    return shard.get_tensor(name).clone()
    raise MoexpError("no input embedding", where=str(folder), valid=" or ".join(EMBEDDINGS))
