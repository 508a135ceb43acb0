"""EAGLE-3 heads in the published format: config.json and model.safetensors with the names of EAGLE and SpecForge.

    fc.weight, midlayer.{hidden_norm, input_layernorm, post_attention_layernorm}.weight,
    midlayer.self_attn.{q,k,v,o}_proj.weight, midlayer.mlp.{gate,up,down}_proj.weight, norm.weight, lm_head.weight,
    d2t (int64 offsets), t2d (bool); rarely embed_tokens.weight

A head that does not fit is refused with the reason: EAGLE-1 and EAGLE-3 heads share a file format and many names, and
confused with each other they would only draft tokens that are never accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moexp.base.atomic import new_folder
from moexp.base.errors import MoexpError
from moexp.target.heads.draft_vocab import checked_vocab
from moexp.target.heads.eagle_head import FEATURES, EagleConfig, EagleHead, default_feature_layers
from moexp.target.shards import check_names, list_tensors, read_tensors, shapes_of
from moexp.target.spec import MoESpec
from moexp.target.trained import TrainedFiles, read_json

FILES = TrainedFiles("a head", "model.safetensors", "moexp_head.json", "moexp-eagle3-1", "train-drafter")
WEIGHTS, CONFIG, HEADER = FILES.weights, "config.json", FILES.header
ARCHITECTURE = "LlamaForCausalLMEagle3"
WHAT = "an EAGLE-3 head"
MAPS = ("d2t", "t2d")


def save_eagle_head(folder: Path, head: EagleHead, fingerprint: str, details: dict[str, Any] | None = None) -> None:
    """Writes a head atomically, as published ones are, and beside it a header that names the target.

    Args:
        fingerprint: of the target (`target_identity`).
        details: recipe, metrics and provenance, for people to read.
    """
    config = config_to_json(head.config, str(head.fc.weight.dtype).removeprefix("torch."))
    with new_folder(folder) as temp:
        (temp / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        FILES.write_into(temp, head.state_dict(), fingerprint, details or {}, metadata={"format": "pt"})


def load_eagle_head(
    folder: Path | str,
    spec: MoESpec,
    embedding: Callable[[Tensor], Tensor],
    *,
    fingerprint: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> EagleHead:
    """Loads a head for a target.

    Args:
        folder: with config.json and safetensors.
        spec: the target's geometry.
        embedding: the target's token embedding.
        fingerprint: of the target; checked where the head names its own.
        dtype: to compute in.

    Raises:
        MoexpError: pickled, damaged or incomplete files; an EAGLE-1 head; a head of another target; a vocabulary map
            that does not fit.
    """
    folder = Path(folder)
    published = read_json(folder / CONFIG, valid=WHAT)
    entries = list_tensors(folder)
    shapes = shapes_of(entries)
    _check_version(shapes, published, folder)
    config = config_from_json(published, shapes, spec, where=str(folder / CONFIG))
    _check_target(config, shapes, spec, folder)
    if fingerprint and (folder / HEADER).is_file():
        header = read_json(folder / HEADER, valid=WHAT)
        if header.get("target"):
            FILES.check_target(header, fingerprint, folder)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        return read_tensors(entries, names, lambda name: dtype)

    maps = read([name for name in MAPS if name in entries])
    vocab = checked_vocab(
        maps.get("d2t"), maps.get("t2d"), draft=config.draft_vocab, vocab=spec.vocab_size, where=str(folder)
    )
    head = EagleHead(config, vocab, embedding, device="meta")
    expected = {name: shape for name, shape in shapes_of(head.state_dict()).items() if name not in MAPS}
    stored = {name: shape for name, shape in shapes.items() if name not in MAPS}
    check_names(expected, stored, where=str(folder), what=WHAT)
    head.load_state_dict(read(expected), strict=False, assign=True)
    return head.eval().requires_grad_(False)


def config_to_json(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """config.json as it is published."""
    rope = dict(config.rope)
    theta = rope.pop("rope_theta", 10000.0)
    published = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        },
    }
    if config.target_hidden != config.hidden:
        published["target_hidden_size"] = config.target_hidden
    return published


def config_from_json(
    published: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], spec: MoESpec, *, where: str
) -> EagleConfig:
    """A published config, completed by what the tensors and the target say.

    Raises:
        MoexpError: a key is missing or no number, or asks for what is not supported.
    """

    def number(key: str, default: Any = None) -> int:
        value = published.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MoexpError(f"{key} is {value!r}", where=where, valid="a positive integer")
        return value

    if published.get("norm_before_residual"):
        raise MoexpError("a head with norm_before_residual", where=where, valid="a head whose residual is not normed")
    if published.get("hidden_act", "silu") != "silu":
        raise MoexpError(f"hidden_act {published['hidden_act']!r}", where=where, valid="silu")
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    rope = dict(published.get("rope_parameters") or published.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    theta = rope.get("rope_theta") or published.get("rope_theta")
    rope["rope_theta"] = float(theta or 10000.0)
    layers = (published.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = layers or published.get("eagle_aux_hidden_state_layer_ids") or default_feature_layers(spec.num_layers)
    return EagleConfig(
        hidden=hidden,
        target_hidden=number("target_hidden_size", hidden),
        vocab=number("vocab_size"),
        draft_vocab=number("draft_vocab_size"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        ffn=number("intermediate_size"),
        feature_layers=tuple(int(layer) for layer in layers),
        norm_eps=float(published.get("rms_norm_eps", 1e-6)),
        max_positions=number("max_position_embeddings", 2048),
        rope=rope,
        attention_bias=any(name.startswith("midlayer.self_attn.") and name.endswith(".bias") for name in shapes),
        own_embedding="embed_tokens.weight" in shapes,
    )


def eagle_version(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """1 or 3 by the tensors' names and shapes, None where they are neither head's."""
    if any(name.startswith("midlayer.") for name in shapes):
        return 3
    fused = shapes.get("fc.weight")
    if any(name.startswith("layers.0.") for name in shapes) and fused is not None and fused[1] == 2 * fused[0]:
        return 1
    return None


def _check_version(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], folder: Path) -> None:
    version, fused = eagle_version(shapes), shapes.get("fc.weight")
    names = [str(name) for name in config.get("architectures") or []]
    if version == 1:
        what = "an EAGLE-1 head: fc reads 2H (embedding and last state), and there is no midlayer"
        valid = "an EAGLE-3 head: fc reads 3H (three layers), one midlayer, d2t and t2d"
    elif version is None:
        what, valid = f"no EAGLE head: {', '.join(sorted(shapes)[:3]) or 'no tensors'} ...", WHAT
    elif any("Eagle" in name and "Eagle3" not in name for name in names):
        what = f"the config says EAGLE-1 ({names[0]}), but the tensors are those of an EAGLE-3 head"
        valid = f"architectures: [{ARCHITECTURE}]"
    elif fused is not None and "hidden_size" in config and fused[1] == 2 * int(config["hidden_size"]):
        what, valid = "a midlayer like EAGLE-3's, but fc reads 2H like EAGLE-1's", "fc [H, 3H]"
    else:
        return
    raise MoexpError(what, where=str(folder), valid=valid)


def _check_target(config: EagleConfig, shapes: Mapping[str, tuple[int, ...]], spec: MoESpec, folder: Path) -> None:
    valid = f"{FILES.what} trained on this very target"
    rows = shapes.get("lm_head.weight", (config.draft_vocab,))[0]
    if config.target_hidden != spec.hidden_size:
        what = f"a head for a target of width {config.target_hidden}, but this one's is {spec.hidden_size}"
    elif config.vocab != spec.vocab_size:
        what = f"a head for a vocabulary of {config.vocab}, but the target has {spec.vocab_size} tokens"
    elif len(config.feature_layers) != FEATURES or not all(0 <= n < spec.num_layers for n in config.feature_layers):
        what = f"a head that reads layers {list(config.feature_layers)} of a target with {spec.num_layers}"
        valid = f"{FEATURES} layers from 0 to {spec.num_layers - 1}"
    elif config.hidden != config.target_hidden and not config.own_embedding:
        what = f"a head of width {config.hidden} for a target of width {config.target_hidden} without an embedding"
        valid = "embed_tokens.weight in the head, or equal widths"
    elif rows != config.draft_vocab:
        what, valid = f"lm_head has {rows} rows, but draft_vocab_size is {config.draft_vocab}", "equal sizes"
    else:
        return
    raise MoexpError(what, where=str(folder), valid=valid)
