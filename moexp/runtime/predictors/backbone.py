"""Decoders that an expert predictor can be built on: a small new one, a checkpoint, or the layers of one.

Shapes: V vocabulary, D the target's hidden size, H the predictor's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, Qwen3Config

from moexp.base.errors import MoexpError
from moexp.base.ridge import solve_ridge
from moexp.config.recipe import Recipe
from moexp.target.hub_folder import hub_folder

SMALL_LAYERS = 4
FITTED = 0.5  # share of an embedding that a linear map must explain to be worth starting from
ROWS = 8192  # of an embedding that exist in double precision at a time


@dataclass
class Backbone:
    """A decoder without vocabulary.

    Attributes:
        model: transformers' base model, fp32, fed with `inputs_embeds`.
        own_VH: the embedding that it was trained with; None for a new one.
    """

    model: PreTrainedModel
    own_VH: Tensor | None = None


def open_backbone(recipe: Recipe, cache: Path) -> Backbone:
    """The backbone that the recipe names.

    Args:
        cache: folder of the dense models that targets are carved from.

    Raises:
        MoexpError: `source` for a target that was not carved; a hub id that cannot be had, or is no such model.
    """
    section = recipe.predictor
    if section.backbone == "small":
        return small_backbone(section.hidden, section.layers or SMALL_LAYERS, section.heads, section.context)
    if section.backbone != "source":
        try:
            folder = hub_folder(section.backbone)
        except MoexpError as error:
            raise MoexpError(error.what, where="predictor.backbone", valid=f"small, source, {error.valid}") from error
        return pretrained_backbone(folder, section.layers)
    target = recipe.target
    if target.kind != "carved":
        raise MoexpError(
            "the target was not carved from a dense model", where="predictor.backbone", valid="small, or a hub id"
        )
    from moexp.target.source import load_dense

    dense = load_dense(target.source, cache=cache, path=target.path, revision=target.revision)
    return cut_backbone(dense.model.model, section.layers)


def small_backbone(hidden: int, layers: int, heads: int, context: int) -> Backbone:
    """A random Qwen3-style decoder. SwiGLU of three times the width; as many key heads as heads."""
    config = Qwen3Config(
        vocab_size=1,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Backbone(AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa"))


def pretrained_backbone(folder: Path, layers: int | None = None) -> Backbone:
    """The base model of a checkpoint folder, or its first `layers` layers.

    Raises:
        MoexpError: no such model, or one with another attention than full causal.
    """
    try:
        model = AutoModel.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise MoexpError(
            f"not a backbone: {str(error).splitlines()[0]}", where="predictor.backbone", valid="a decoder-only model"
        ) from error
    return cut_backbone(model, layers)


def cut_backbone(model: Any, layers: int | None) -> Backbone:
    """The first `layers` layers of a base model, in fp32 and without its embedding. The model itself is used up.

    Raises:
        MoexpError: fewer layers than that, or another attention than full causal.
    """
    config = model.config
    kinds = getattr(config, "layer_types", None)
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if any(kind != "full_attention" for kind in kinds) if kinds else windows:
        raise MoexpError("a backbone whose attention is not full", where="predictor.backbone", valid="full attention")
    if layers is not None:
        if layers > config.num_hidden_layers:
            raise MoexpError(f"{layers} layers of a backbone of {config.num_hidden_layers}", where="predictor.layers")
        model.layers = model.layers[:layers]
        config.num_hidden_layers = layers
        if kinds:
            config.layer_types = kinds[:layers]
    own_VH = model.get_input_embeddings().weight.detach()
    model.set_input_embeddings(nn.Embedding(1, own_VH.shape[1]))
    config.vocab_size = 1
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model.set_attn_implementation("sdpa")
    return Backbone(model.float().requires_grad_(True), own_VH)


def fit_projection(from_VD: Tensor, to_VH: Tensor) -> Tensor | None:
    """The linear map [H, D] from one embedding to another of the same vocabulary, by least squares.

    Returns:
        None where it explains less than half of the second embedding: then token ids do not mean the same.
    """
    gram_DD = torch.zeros(from_VD.shape[1], from_VD.shape[1], dtype=torch.float64)
    mixed_DH = torch.zeros(from_VD.shape[1], to_VH.shape[1], dtype=torch.float64)
    for from_CD, to_CH in zip(from_VD.split(ROWS), to_VH.split(ROWS), strict=True):
        gram_DD += from_CD.double().T @ from_CD.double()
        mixed_DH += from_CD.double().T @ to_CH.double()
    map_DH = solve_ridge(gram_DD, mixed_DH, 1e-9).to(to_VH.dtype)
    left = (to_VH - from_VD @ map_DH).square().sum() / to_VH.square().sum()
    return None if float(left) > 1 - FITTED else map_DH.T.contiguous()


def rms(weight: Tensor) -> float:
    """Root of the mean square of a weight."""
    return float(torch.linalg.vector_norm(weight, dtype=torch.float32)) / math.sqrt(weight.numel())
