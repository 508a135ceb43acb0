"""The MoE families moexp can run: where transformers' modules keep the router, the experts and the shared experts.

This table is the only place that knows a family by name (tensor names in a checkpoint are in `experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moexp.errors import MoexpError


def _after_first_dense(config: Any, layer: int) -> bool:
    return layer >= config.first_k_dense_replace


def _every_sparse_step(config: Any, layer: int) -> bool:
    dense = layer in config.mlp_only_layers or config.num_experts == 0
    return not dense and (layer + 1) % config.decoder_sparse_step == 0


@dataclass(frozen=True)
class Family:
    """Attribute names of one model type.

    Attributes:
        is_moe: (config, decoder layer) -> whether that layer routes.
        num_experts, num_shared: config attributes (None: the family has no shared expert).
        router, experts, shared: attributes of a MoE layer's `mlp` module.
        attention: "gqa" where attention is grouped-query with rotate-half rotary positions, which has a restructured
            path (runtime/attention.py); "module" runs transformers' own module.
        routing: "sigmoid" where experts are chosen by sigmoid score + bias, which has a restructured path; "module"
            runs transformers' own router.
    """

    is_moe: Callable[[Any, int], bool]
    num_experts: str = "n_routed_experts"
    num_shared: str | None = "n_shared_experts"
    router: str = "gate"
    experts: str = "experts"
    shared: str | None = "shared_experts"
    attention: Literal["gqa", "module"] = "module"
    routing: Literal["sigmoid", "module"] = "module"


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(is_moe=_after_first_dense),
    "deepseek_v3": Family(is_moe=_after_first_dense, routing="sigmoid"),
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
