"""Small draft heads for tests: published EAGLE checkpoints written tensor by tensor, and a DeepSeek-V3-style checkpoint
with its MTP layer in a shard of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moexp.target.heads.draft_vocab import DraftVocab
from moexp.target.heads.eagle_head import EagleConfig, EagleHead, new_eagle_head
from moexp.target.spec import MoESpec
from moexp.target.tiny import TinyTarget, build_tiny_target

H, V, D, HEADS, KV, W, FFN = 32, 100, 24, 4, 2, 8, 48
DRAFTED = [0, 2, 3, 5, 8, 13, 21, 34, 40, 41, 42, 43, 50, 55, 60, 61, 62, 70, 71, 80, 81, 90, 98, 99]
SPEC = MoESpec("qwen3_moe", H, 12, tuple(range(12)), 8, 2, 0, 16, V, 512, HEADS, KV)


def embedding(seed: int = 0, vocab: int = V, hidden: int = H) -> nn.Embedding:
    layer = nn.Embedding(vocab, hidden).requires_grad_(False)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(seed))
    return layer


def eagle_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a published EAGLE-3 head, with their published names."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(H, generator=generator)).to(dtype)

    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[DRAFTED] = True
    return {
        "d2t": torch.tensor(DRAFTED) - torch.arange(D),
        "t2d": t2d,
        "fc.weight": matrix(H, 3 * H),
        "lm_head.weight": matrix(D, H),
        "norm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * W, 2 * H),
        "midlayer.self_attn.k_proj.weight": matrix(KV * W, 2 * H),
        "midlayer.self_attn.v_proj.weight": matrix(KV * W, 2 * H),
        "midlayer.self_attn.o_proj.weight": matrix(H, HEADS * W),
        "midlayer.mlp.gate_proj.weight": matrix(FFN, H),
        "midlayer.mlp.up_proj.weight": matrix(FFN, H),
        "midlayer.mlp.down_proj.weight": matrix(H, FFN),
    }


def eagle_json(**changes: Any) -> dict[str, Any]:
    """config.json as SpecForge publishes it; a change to None removes the key."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
        "attention_bias": False,
        "draft_vocab_size": D,
        "head_dim": W,
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": FFN,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": V,
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not None or key == "rope_scaling"}


def write_head(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle_1_tensors() -> dict[str, Tensor]:
    """The names and shapes of a published EAGLE-1 head."""
    three = eagle_tensors()
    layer = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in three.items()
        if name.startswith("midlayer.") and "hidden_norm" not in name and "input_layernorm" not in name
    }
    attention = {name: t[:, :H].clone() for name, t in layer.items() if name[-14] in "qkv" and "self_attn" in name}
    return {
        **layer,
        **attention,
        "fc.weight": torch.randn(H, 2 * H),
        "fc.bias": torch.zeros(H),
        "embed_tokens.weight": torch.randn(V, H),
    }


def small_eagle(model: Any, drafted: list[int], *, seed: int = 0) -> EagleHead:
    """A random head for a tiny target in memory."""
    config = EagleConfig.for_target(model.config, len(drafted), ffn=48)
    vocab = DraftVocab.from_ids(drafted, model.config.vocab_size)
    return new_eagle_head(config, vocab, model.get_input_embeddings(), seed=seed)


def deepseek_with_mtp(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny DeepSeek-V3 checkpoint in several shards; one more holds an MTP layer whose decoder layer has the weights
    of the target's last one."""
    geometry = {"hidden": 32, "layers": 2, "experts": 4, "top_k": 2, "shared": 1, "expert_width": 16}
    build_tiny_target(folder, TinyTarget(model_type="deepseek_v3", max_shard_size="60KB", **(geometry | changes)))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    placed = index["weight_map"]
    layers, hidden = 2, 32
    last, mtp = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors: dict[str, Tensor] = {}
    for file in sorted({folder / shard for shard in placed.values()}):
        for name, tensor in load_file(file).items():
            if name.startswith(last):
                tensors[mtp + name.removeprefix(last)] = tensor.clone()
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                copied = "embed_tokens.weight" if "embed" in name else "shared_head.head.weight"
                tensors[mtp + copied] = tensor.clone()
    generator = torch.Generator().manual_seed(seed)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{mtp}{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    tensors[f"{mtp}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    write_mtp(folder, tensors)
    return folder


def write_mtp(folder: Path, tensors: dict[str, Tensor], shard: str = "model-mtp.safetensors") -> None:
    """Replaces the MTP shard and its entries in the index."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = {name: at for name, at in index["weight_map"].items() if at != shard}
    index["weight_map"] |= dict.fromkeys(tensors, shard)
    save_file(tensors, folder / shard)
    file.write_text(json.dumps(index))
