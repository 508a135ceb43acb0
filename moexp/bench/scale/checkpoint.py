"""Writes a checkpoint of DeepSeek-V2-Lite's shape and tensor names with random weights, shard by shard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moexp.target.shards import header_bytes
from moexp.target.tiny import byte_tokenizer

SHARD_BYTES = 2 << 30
_DRAWN = 16 << 20  # weights drawn at a time

V2_LITE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102_400,
    "max_position_embeddings": 163_840,
}
"""The published geometry of DeepSeek-V2-Lite."""

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(
    folder: Path,
    geometry: dict[str, Any],
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    advance: Callable[[int], None] = lambda done: None,
) -> Path:
    """Writes the checkpoint; `folder/config.json` comes last, so that a folder without one is not complete.

    Args:
        geometry: config values, as `V2_LITE`.
        seed: of the weights.
        shard_bytes: a shard ends with the first tensor that takes it beyond.
        advance: called with the bytes written so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = {"model_type": "deepseek_v2", **_COMMON, **geometry, **ids}
    shapes = dict(sorted(tensor_shapes(config).items()))
    placed: dict[str, str] = {}
    done = 0
    shards = list(_shards(shapes, shard_bytes))
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        with open(folder / file, "wb") as out:
            out.write(_header({name: shapes[name] for name in names}))
            for name in names:
                for chunk in _weights(name, shapes[name], seed):
                    out.write(chunk)
                    done += len(chunk)
                    advance(done)
        placed.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": done}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def checkpoint_bytes(geometry: dict[str, Any]) -> int:
    """Size of the weights."""
    shapes = tensor_shapes({"model_type": "deepseek_v2", **_COMMON, **geometry})
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as the hub's checkpoints have them (an expert's matrices are tensors of their
    own)."""
    values = {name: value for name, value in config.items() if name not in ("model_type", "torch_dtype")}
    built = AutoConfig.for_model(config["model_type"], **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if ".mlp.experts." not in name}
    hidden, width = built.hidden_size, built.moe_intermediate_size
    for layer in range(built.first_k_dense_replace, built.num_hidden_layers):
        for expert in range(built.n_routed_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            shapes[f"{prefix}gate_proj.weight"] = shapes[f"{prefix}up_proj.weight"] = (width, hidden)
            shapes[f"{prefix}down_proj.weight"] = (hidden, width)
    return shapes


def _shards(shapes: dict[str, tuple[int, ...]], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        names.append(name)
        size += 2 * math.prod(shape)
        if size >= shard_bytes and not name.endswith(("down_proj.weight", "gate_proj.weight")):  # no expert is cut
            yield names
            names, size = [], 0
    if names:
        yield names


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    return header_bytes(entries)


def _weights(name: str, shape: tuple[int, ...], seed: int) -> Iterator[memoryview]:
    """Scaled so that activations keep their size, experts count, and logits spread."""
    count = math.prod(shape)
    if len(shape) == 1:
        yield torch.ones(count, dtype=torch.bfloat16).view(torch.uint8).numpy().data
        return
    gain = {"embed_tokens": 1.0 * math.sqrt(shape[-1]), "lm_head": 4.0, ".mlp.gate.": 1.5}
    std = next((value for part, value in gain.items() if part in name), 1.0) / math.sqrt(shape[-1])
    generator = np.random.default_rng([seed, *name.encode()])
    for begin in range(0, count, _DRAWN):
        drawn = generator.standard_normal(min(_DRAWN, count - begin), dtype=np.float32)
        drawn *= np.float32(std)
        yield torch.from_numpy(drawn).bfloat16().view(torch.uint8).numpy().data
