"""The shape of a recipe's target, from published configs or from a local checkpoint's; no weight is read or fetched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moexp.base.errors import MoexpError
from moexp.config.recipe import Recipe
from moexp.sim.platforms.geometry import (
    PUBLISHED_MODELS,
    Attention,
    ModelGeometry,
    grouped_attention,
    latent_attention,
)
from moexp.target.opening import find_target

_PRECISIONS = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}  # by bytes
_QUANTISED = {"fp8": ("fp8", "fp8"), "mxfp4": ("mxfp4", "bf16")}  # of experts, of everything else


@dataclass(frozen=True)
class Shape:
    """What is planned for.

    Attributes:
        geometry: of the target.
        place: hub id (with its revision) or folder.
        checkpoint_bytes: of its shards.
        counted: whether they are here and were counted; else they were calculated.
    """

    geometry: ModelGeometry
    place: str
    checkpoint_bytes: int
    counted: bool = False


def shape_of(recipe: Recipe) -> Shape:
    """The shape of the recipe's target.

    A folder is read (its config.json, the sizes of its shards); of a hub id the published config counts, or that of the
    cache of huggingface_hub.

    Raises:
        MoexpError: an id whose shape is not known, a target that is not built, or a family that is not supported.
    """
    target = recipe.target
    path = target.path or ""
    if target.kind != "hub" or Path(path).expanduser().is_dir() or path.startswith(("/", ".", "~")):
        return folder_shape(find_target(recipe, padded=True), recipe.name)
    place = f"{path} at {target.revision or 'main'}"
    for geometry in PUBLISHED_MODELS.values():
        if path in geometry.hub_ids:
            return Shape(geometry, place, geometry.checkpoint_bytes())
    cached = _cached_config(path, target.revision)
    if cached is None:
        known = ", ".join(geometry.hub_ids[0] for geometry in PUBLISHED_MODELS.values())
        raise MoexpError(f"the shape of {path} is not known while its files are not here", where="target.path",
                         valid=f"a local folder, an id in the local cache, or one of {known}")  # fmt: skip
    shape = folder_shape(cached, recipe.name)
    return replace(shape, place=place)


def folder_shape(folder: Path, name: str) -> Shape:
    """The shape of a checkpoint folder, or of one that holds no more than its config yet.

    Raises:
        MoexpError: no config, or a family that is not supported.
    """
    from moexp.target.families import family_of
    from moexp.target.load import read_config
    from moexp.target.spec import MoESpec

    config = read_config(folder)
    spec = MoESpec.from_config(config)
    experts, resident = _precisions(config, folder)
    interleaved = getattr(family_of(config.model_type), "layout", "") == "interleaved"  # these experts have biases
    geometry = ModelGeometry(
        name=name,
        layers=spec.num_layers,
        moe_layers=len(spec.moe_layers),
        hidden=spec.hidden_size,
        experts=spec.num_experts,
        top_k=spec.top_k,
        shared_experts=spec.num_shared,
        expert_width=spec.expert_width,
        attention=_attention(config),
        dense_width=config.intermediate_size if len(spec.moe_layers) < spec.num_layers else 0,
        vocab=spec.vocab_size,
        source=f"config.json of {folder}",
        expert_bias_params=2 * spec.expert_width + spec.hidden_size if interleaved else 0,
        precision=experts,
        resident_precision=resident,
    )
    shards = list(folder.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards) if shards else geometry.checkpoint_bytes()
    return Shape(geometry, str(folder), size, bool(shards))


def _attention(config: Any) -> Attention:
    """One layer's attention."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank = getattr(config, "kv_lora_rank", None)
    if rank is None:
        width = getattr(config, "head_dim", None) or hidden // heads
        return grouped_attention(hidden, heads=heads, kv_heads=config.num_key_value_heads, width=width)
    return latent_attention(
        hidden,
        heads=heads,
        q_rank=config.q_lora_rank,
        kv_rank=rank,
        plain=config.qk_nope_head_dim,
        rotary=config.qk_rope_head_dim,
        value=config.v_head_dim,
    )


def _precisions(config: Any, folder: Path) -> tuple[str, str]:
    """Formats of routed experts and of the rest."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        if method not in _QUANTISED:
            raise MoexpError(f"weights quantised as {method!r}", where=str(folder), valid=", ".join(_QUANTISED))
        return _QUANTISED[method]
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    if dtype not in _PRECISIONS:
        raise MoexpError(f"weights in {dtype}", where=str(folder), valid=", ".join(_PRECISIONS))
    return _PRECISIONS[dtype], _PRECISIONS[dtype]


def _cached_config(hub_id: str, revision: str | None) -> Path | None:
    """The folder of an id's config.json in the cache of huggingface_hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
