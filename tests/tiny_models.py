"""Small random models for tests: a dense one to carve, and MoE targets with all their experts in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from moexp.target.tiny import TinyTarget, build_tiny_target, byte_tokenizer


def dense_model(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A random Llama-style model whose feed-forward blocks matter (hidden 64, byte vocabulary)."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=byte_tokenizer().eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0.0, (1.5 if "mlp" in name else 1.0) * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def dense_folder(folder: Path) -> Path:
    """`dense_model` as a checkpoint with a byte tokenizer and a chat template."""
    dense_model(dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_folder(folder: Path, **changes: Any) -> Path:
    """A random MoE target of three layers, two of them with experts."""
    geometry = {"hidden": 32, "layers": 3, "experts": 8, "top_k": 3, "shared": 1, "expert_width": 16}
    return build_tiny_target(folder, TinyTarget(**(geometry | changes)))


def whole_model(folder: Path) -> Any:
    """The target with its experts in memory, as training has it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def random_rows(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token rows, int32 [N, L], of ordinary bytes."""
    return torch.randint(0, 90, (rows, length), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
