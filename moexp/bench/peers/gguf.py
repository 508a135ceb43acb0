"""A carved target (`glm4_moe`) as a GGUF file in bf16, for llama.cpp. Token ids only: no tokenizer is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    get_tensor_name_map,
)
from torch import Tensor

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.runtime.store.host import load_experts
from moexp.target.load import load_target

ARCH = MODEL_ARCH_NAMES[MODEL_ARCH.GLM4_MOE]

_FP32 = ("norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias")  # as llama.cpp wants them


def write_gguf(folder: Path, file: Path, advance: Callable[[int], None] = lambda layers: None) -> None:
    """Writes the checkpoint in `folder` to `file`, unless that exists.

    Args:
        advance: called with the number of MoE layers converted.

    Raises:
        MoexpError: another family, or biases and norms that this does not write.
    """
    if file.exists():
        return
    target = load_target(folder, dtype=torch.bfloat16)
    config, spec = target.model.config, target.spec
    if config.model_type != "glm4_moe" or config.use_qk_norm or config.attention_bias:
        raise MoexpError(f"a target of family {config.model_type}", where=str(folder), valid="a carved one")
    partial = file.with_suffix(".part")
    with atomic.writing(file):
        writer = GGUFWriter(partial, ARCH)
        _write_settings(writer, config)
        for name, tensor in _resident(target.model.state_dict(), config.num_hidden_layers):
            _add(writer, name, tensor)
        experts = load_experts(target.index)
        for done, layer in enumerate(spec.moe_layers, 1):
            of_layer = [experts[layer, expert] for expert in range(spec.num_experts)]
            halves = [weights.gate_up.chunk(2) for weights in of_layer]
            _add(writer, f"blk.{layer}.ffn_gate_exps.weight", torch.stack([gate for gate, _ in halves]))
            _add(writer, f"blk.{layer}.ffn_up_exps.weight", torch.stack([up for _, up in halves]))
            _add(writer, f"blk.{layer}.ffn_down_exps.weight", torch.stack([weights.down for weights in of_layer]))
            advance(done)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(file)


def expert_ranges(file: Path) -> list[tuple[int, int]]:
    """Bytes of the file (begin, end) that hold routed experts."""
    tensors = [tensor for tensor in GGUFReader(file).tensors if "_exps." in tensor.name]
    return [(int(tensor.data_offset), int(tensor.data_offset) + int(tensor.n_bytes)) for tensor in tensors]


def _write_settings(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_nextn_predict_layers(0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _resident(state: dict[str, Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """All weights but those of routed experts, by llama.cpp's names."""
    names = get_tensor_name_map(MODEL_ARCH.GLM4_MOE, layers)
    for name, tensor in state.items():
        gguf_name = names.get_name(name.replace("correction_bias", "correction.bias"), (".weight", ".bias"))
        if gguf_name is not None and not tensor.is_meta:
            yield gguf_name, tensor


def _add(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    if name.endswith(_FP32):
        writer.add_tensor(name, tensor.float().numpy())
        return
    halves = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    raw = halves.view(np.uint8)
    writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=GGMLQuantizationType.BF16)
