"""A carved target (`glm4_moe`) as a GGUF file in bf16, for llama.cpp. Token ids only: no tokenizer is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, ExpertGatingFuncType, GGMLQuantizationType, GGUFReader, GGUFWriter
from torch import Tensor

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.runtime.store.host import load_experts
from moexp.target.load import load_target

ARCH = MODEL_ARCH_NAMES[MODEL_ARCH.GLM4_MOE]

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_FP32 = ("norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias")  # as llama.cpp wants them


def write_gguf(folder: Path, file: Path, advance: Callable[[int], None] = lambda layers: None) -> None:
    """Writes the checkpoint in `folder` to `file`, unless that is there.

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
            mine = [experts[layer, expert] for expert in range(spec.num_experts)]
            halves = [weights.gate_up.chunk(2) for weights in mine]
            _add(writer, f"blk.{layer}.ffn_gate_exps.weight", torch.stack([gate for gate, _ in halves]))
            _add(writer, f"blk.{layer}.ffn_up_exps.weight", torch.stack([up for _, up in halves]))
            _add(writer, f"blk.{layer}.ffn_down_exps.weight", torch.stack([weights.down for weights in mine]))
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
    for theirs, ours in _WHOLE.items():
        yield ours, state[theirs]
    for layer in range(layers):
        for theirs, ours in _LAYER.items():
            tensor = state.get(f"model.layers.{layer}.{theirs}")
            if tensor is not None:
                yield f"blk.{layer}.{ours}", tensor


def _add(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    if name.endswith(_FP32):
        writer.add_tensor(name, tensor.float().numpy())
        return
    halves = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    raw = halves.view(np.uint8)
    writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=GGMLQuantizationType.BF16)
