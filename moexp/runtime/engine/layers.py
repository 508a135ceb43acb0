"""The target as an engine runs it: its layers as plain functions over a block, from transformers' own modules.

Attention, routing and feed-forward are restructured where the family has such a form; weights are fused and packed for
the rows of a decoding step.

Shape suffixes: T rows of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moexp.runtime.engine.attention import BlockContext, GroupedAttention, ModuleAttention
from moexp.runtime.engine.linear import SwiGLU, make_linear
from moexp.runtime.engine.moe import (
    ExpertCompute,
    Gating,
    MoELayer,
    can_route_by_sigmoid,
    clamped_gating,
    module_route,
    sigmoid_route,
    silu_gating,
)
from moexp.target.draft_expert import DraftExperts
from moexp.target.load import Target


class LayerDrafts(Protocol):
    """Draft experts as `moexp.target.draft_expert.DraftExperts` has them."""

    def forward_layer(self, layer: int, x_TH: Tensor) -> Tensor:
        """Scaled output of the layer's draft expert."""


@dataclass
class Layer:
    """One decoder layer: attention, then either its experts or a dense feed-forward block."""

    norm_1: Callable[[Tensor], Tensor]
    attend: Callable[[Tensor, BlockContext], Tensor]
    norm_2: Callable[[Tensor], Tensor]
    moe: MoELayer | None
    dense: Callable[[Tensor], Tensor] | None


@dataclass
class Network:
    """A target's layers and what stands before and behind them.

    Attributes:
        embed: ids [T] -> [T, H].
        layers: in order.
        final_norm: [T, H] -> [T, H].
        head: [T, H] -> logits [T, V].
    """

    embed: Callable[[Tensor], Tensor]
    layers: list[Layer]
    final_norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls,
        target: Target,
        *,
        block: int,
        draft_rows: int,
        draft_experts: LayerDrafts | None,
        restructured: bool,
        pack: bool,
    ) -> Network:
        """The network of a target; arguments as for `Engine`."""
        spec, model = target.spec, target.model
        base: Any = model.model
        compute = {
            rows: ExpertCompute(
                rows=rows,
                max_union=min(spec.num_experts, rows * spec.top_k),
                hidden=spec.hidden_size,
                width=spec.expert_width,
                dtype=target.dtype,
                device=target.device,
                gating=_gating(target),
            )
            for rows in {block, draft_rows}
        }
        fused = restructures_attention(target, restructured)
        layers = []
        for number, module in enumerate(base.layers):
            is_moe = number in spec.moe_layers
            resident = _feed_forward(target, module.mlp, is_moe, block, restructured, pack)
            moe = None
            if is_moe:
                drafting = _drafting(target, module.mlp, resident, draft_experts, number, draft_rows, pack)
                route = _route(target, module.mlp, restructured)
                moe = MoELayer(number, route, resident, spec.num_experts, compute, drafting)
            layers.append(
                Layer(
                    norm_1=_norm(module.input_layernorm, fused),
                    attend=_attention(target, module.self_attn, number, block, fused, pack),
                    norm_2=_norm(module.post_attention_layernorm, fused),
                    moe=moe,
                    dense=None if is_moe else resident,
                )
            )
        head: Any = model.get_output_embeddings()
        return cls(
            embed=model.get_input_embeddings(),
            layers=layers,
            final_norm=_norm(base.norm, fused),
            head=make_linear(head.weight, head.bias, rows=block, pack=pack),
        )


def restructures_attention(target: Target, restructured: bool) -> bool:
    """Whether attention (and with it rotary positions and norms) takes the restructured form."""
    return restructured and target.family.attention == "gqa"


def _attention(
    target: Target, module: Any, layer: int, rows: int, fused: bool, pack: bool
) -> Callable[[Tensor, BlockContext], Tensor]:
    if not fused:
        return ModuleAttention(module)
    spec = target.spec
    return GroupedAttention(
        module, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, layer=layer, rows=rows, pack=pack
    )


def _feed_forward(
    target: Target, mlp: Any, is_moe: bool, rows: int, restructured: bool, pack: bool
) -> Callable[[Tensor], Tensor] | None:
    """The dense block of a layer, or the shared experts of one with experts; None where it has none."""
    shared = target.family.shared
    if is_moe and not shared:
        return None
    resident: Any = getattr(mlp, shared) if is_moe and shared else mlp
    return SwiGLU.from_module(resident, rows=rows, pack=pack) if restructured else resident


def _route(target: Target, mlp: nn.Module, restructured: bool) -> Any:
    router = getattr(mlp, target.family.router)
    by_sigmoid = restructured and target.family.routing == "sigmoid" and can_route_by_sigmoid(router)
    return sigmoid_route(router) if by_sigmoid else module_route(router)


def _gating(target: Target) -> Gating:
    if target.family.activation == "silu":
        return silu_gating
    config = target.model.config
    return clamped_gating(float(config.swiglu_alpha), float(config.swiglu_limit))


def _drafting(
    target: Target,
    mlp: Any,
    resident: Callable[[Tensor], Tensor] | None,
    drafts: LayerDrafts | None,
    layer: int,
    rows: int,
    pack: bool,
) -> Callable[[Tensor], Tensor] | None:
    """Shared experts and the layer's scaled draft expert together, what a draft step runs in the place of `resident`:
    one wider block where both are restructured, at half the kernel calls. None without draft experts.
    """
    if drafts is None:
        return None
    if not isinstance(drafts, DraftExperts):
        return _sum(resident, partial(drafts.forward_layer, layer))
    weights: Any = drafts.experts[str(layer)]
    gates_up = [weights.gate_up.chunk(2)]
    downs = [(weights.down.float() * weights.scale.float()).to(weights.down.dtype)]
    if isinstance(resident, SwiGLU):
        assert target.family.shared is not None
        shared = getattr(mlp, target.family.shared)
        gates_up.insert(0, (shared.gate_proj.weight, shared.up_proj.weight))
        downs.insert(0, shared.down_proj.weight)
        resident = None
    gate_up = torch.cat([part for parts in zip(*gates_up, strict=True) for part in parts])
    return _sum(resident, SwiGLU(gate_up, torch.cat(downs, dim=1), rows=rows, pack=pack))


def _sum(first: Callable[[Tensor], Tensor] | None, second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return second if first is None else lambda x_TH: first(x_TH) + second(x_TH)


def _norm(module: Any, fused: bool) -> Callable[[Tensor], Tensor]:
    if not fused:
        return module
    weight, eps, shape = module.weight, module.variance_epsilon, module.weight.shape
    return lambda x_TH: F.rms_norm(x_TH, shape, weight, eps)
