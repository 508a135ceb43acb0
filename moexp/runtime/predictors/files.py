"""Expert predictors on disk: a folder of `predictor.safetensors` and `predictor.json`, which names its target.

The target's embedding is not in it: it is read from the target, and the two belong together.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from moexp.base.atomic import writing
from moexp.base.errors import MoexpError
from moexp.data.traces import RoutingGeometry
from moexp.runtime.predictors.backbone import Backbone
from moexp.runtime.predictors.learned import RoutingPredictor
from moexp.target.shards import DTYPES, list_tensors, read_tensors
from moexp.target.trained import TrainedFiles

FILES = TrainedFiles(
    what="a predictor",
    weights="predictor.safetensors",
    header="predictor.json",
    format="moexp-expert-predictor-1",
    command="train-predictor",
    missing="no expert predictor",
    content="predictor",
)
WEIGHTS, HEADER, read_header = FILES.weights, FILES.header, FILES.read_header
NOT_KEPT = ("transformers_version", "auto_map", "architectures", "_name_or_path", "dtype")
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")


def write_predictor(
    folder: Path, model: RoutingPredictor, target: str, details: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes a predictor into `folder`, the header last: a folder without it is no predictor.

    Args:
        target: the target's identity (`moexp.target.load.target_identity`).
        details: tokenizer, recipe, metrics, provenance; for reading.
        dtype: of the weights on disk.
    """
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    config = json.loads(model.backbone.config.to_json_string(use_diff=True))
    geometry = {
        **asdict(model.geometry),
        "context": model.context,
        "backbone": {key: value for key, value in config.items() if key not in NOT_KEPT},
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        FILES.write_into(folder, tensors, target, geometry | details)


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
    header = FILES.header_for(folder, target)
    geometry = RoutingGeometry.from_json(header)
    tensors = FILES.tensors(folder)
    try:
        config = AutoConfig.for_model(**header["backbone"])
        backbone = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model = RoutingPredictor(Backbone(backbone), embedding_VD, geometry, context=header["context"])
        model.load_state_dict(tensors)
    except (OSError, RuntimeError, ValueError) as error:
        raise FILES.damaged(folder, error) from error
    return model.cast(dtype).eval().requires_grad_(False)


def target_embedding(folder: Path) -> Tensor:
    """The input embedding [V, D] of a checkpoint, and nothing else of it.

    Raises:
        MoexpError: no shard has one.
    """
    entries = list_tensors(folder)
    for name in EMBEDDINGS:
        if name in entries:
            return read_tensors(entries, [name], lambda name: DTYPES[entries[name].dtype])[name]
    raise MoexpError("no input embedding", where=str(folder), valid=" or ".join(EMBEDDINGS))
