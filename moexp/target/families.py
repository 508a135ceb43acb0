"""The MoE families moexp can run: where transformers' modules keep the router, the experts and the shared experts, and
under which names a checkpoint on the hub keeps the experts' tensors.

This table is the only place that knows a family by name.

A family without shared experts drafts all the same: shared + top-r is then top-r alone, and a draft expert's layer
computes g_e1 E_e1(h) + gamma E_d(h), equation 5 without its first term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moexp.base.errors import MoexpError


def _after_first_dense(config: Any, layer: int) -> bool:
    return layer >= config.first_k_dense_replace


def _every_sparse_step(config: Any, layer: int) -> bool:
    dense = layer in config.mlp_only_layers or config.num_experts == 0
    return not dense and (layer + 1) % config.decoder_sparse_step == 0


def _always(config: Any, layer: int) -> bool:
    return True


_MLP = "model.layers.{layer}.mlp.experts."
_GATED_MLP = {
    "gate": _MLP + "{expert}.gate_proj.weight",
    "up": _MLP + "{expert}.up_proj.weight",
    "down": _MLP + "{expert}.down_proj.weight",
}
_W123 = {
    "gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}
# One tensor of all experts of a layer: [E, H, 2I] with gate and up columns in turn, and [E, I, H].
_INTERLEAVED = {
    "gate_up": _MLP + "gate_up_proj",
    "gate_up_bias": _MLP + "gate_up_proj_bias",
    "down": _MLP + "down_proj",
    "down_bias": _MLP + "down_proj_bias",
}


@dataclass(frozen=True)
class Family:
    """Attribute names of one model type.

    Attributes:
        is_moe: (config, decoder layer) -> whether that layer routes.
        num_experts, num_shared: config attributes (None: the family has no shared expert).
        expert_width: config attribute of one routed expert's inner width.
        router, experts, shared: attributes of a MoE layer's `mlp` module.
        tensors: checkpoint name of each of an expert's tensors, with `{layer}` and `{expert}` in place of the numbers.
        layout: "gated" where each expert has a gate, an up and a down matrix of its own; "interleaved" where a layer's
            experts lie in one tensor, transposed, gate and up in turn, with biases.
        renames: fragments of tensor names, (in checkpoints, in transformers' model).
        activation: "silu": silu(gate) * up; "clamped": GPT-OSS's, whose constants are in the config.
        mlp_returns_scores: the `mlp` module returns (output, router scores) and not the output alone.
        sinks: attention has a learned logit a head that takes part in its softmax (transformers then has no SDPA).
        attention: "gqa" where attention is grouped-query with rotate-half rotary positions, which has a restructured
            path (runtime/attention.py); "module" runs transformers' own module.
        routing: "sigmoid" where experts are chosen by sigmoid score + bias, which has a restructured path; "module"
            runs transformers' own router.
    """

    is_moe: Callable[[Any, int], bool]
    num_experts: str = "n_routed_experts"
    num_shared: str | None = "n_shared_experts"
    expert_width: str = "moe_intermediate_size"
    router: str = "gate"
    experts: str = "experts"
    shared: str | None = "shared_experts"
    tensors: Mapping[str, str] = field(default_factory=lambda: _GATED_MLP)
    layout: Literal["gated", "interleaved"] = "gated"
    renames: tuple[tuple[str, str], ...] = ()
    activation: Literal["silu", "clamped"] = "silu"
    mlp_returns_scores: bool = False
    sinks: bool = False
    attention: Literal["gqa", "module"] = "module"
    routing: Literal["sigmoid", "module"] = "module"


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(is_moe=_after_first_dense),
    "deepseek_v3": Family(is_moe=_after_first_dense, routing="sigmoid"),
    "gpt_oss": Family(
        is_moe=_always,
        num_experts="num_local_experts",
        num_shared=None,
        expert_width="intermediate_size",
        router="router",
        shared=None,
        tensors=_INTERLEAVED,
        layout="interleaved",
        activation="clamped",
        mlp_returns_scores=True,
        sinks=True,
    ),
    "mixtral": Family(
        is_moe=_always,
        num_experts="num_local_experts",
        num_shared=None,
        expert_width="intermediate_size",
        shared=None,
        tensors=_W123,
        renames=((".block_sparse_moe.", ".mlp."),),
        attention="gqa",
    ),
    "olmoe": Family(
        is_moe=_always,
        num_experts="num_experts",
        num_shared=None,
        expert_width="intermediate_size",
        shared=None,
    ),
    "glm4_moe": Family(is_moe=_after_first_dense, attention="gqa", routing="sigmoid"),
    "qwen3_moe": Family(
        is_moe=_every_sparse_step,
        num_experts="num_experts",
        num_shared=None,
        shared=None,
        attention="gqa",
    ),
}


def family_of(model_type: str) -> Family:
    """The family of a Hugging Face model type.

    Raises:
        MoexpError: not a supported MoE family.
    """
    if model_type not in FAMILIES:
        raise MoexpError(f"model type {model_type!r} is not a supported MoE family", valid=", ".join(sorted(FAMILIES)))
    return FAMILIES[model_type]


def window_of(config: Any, layer: int) -> int | None:
    """How many positions, its own included, a row of decoder layer `layer` attends to; None: all before it."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None
