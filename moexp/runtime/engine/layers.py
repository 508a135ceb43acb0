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
from moexp.runtime.engine.experts import ExpertCompute, Gating, clamped_gating, silu_gating
from moexp.runtime.engine.linear import SwiGLU, make_linear
from moexp.runtime.engine.moe import MoELayer
from moexp.runtime.engine.routing import Route, can_route_by_sigmoid, module_route, sigmoid_route
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
    def of(cls, target: Target, *, block: int, draft_experts: LayerDrafts | None, pack: bool) -> Network:
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
            for rows in (block, 1)
        }
        layers = []
        for number, module in enumerate(base.layers):
            resident = _feed_forward(target, module.mlp, number, block, pack)
            moe = None
            if number in spec.moe_layers:
                drafting = _drafting(target, module.mlp, resident, draft_experts, number, pack)
                route = _route(target, module.mlp)
                moe = MoELayer(number, route, resident, spec.num_experts, compute, drafting)
            layers.append(
                Layer(
                    norm_1=_norm(target, module.input_layernorm),
                    attend=_attention(target, module.self_attn, block, pack),
                    norm_2=_norm(target, module.post_attention_layernorm),
                    moe=moe,
                    dense=None if moe is not None else resident,
                )
            )
        head: Any = model.get_output_embeddings()
        return cls(
            embed=model.get_input_embeddings(),
            layers=layers,
            final_norm=_norm(target, base.norm),
            head=make_linear(head.weight, head.bias, rows=block, pack=pack),
        )


def restructures_attention(target: Target) -> bool:
    """Whether attention (and with it rotary positions and norms) takes the restructured form."""
    return target.family.attention == "gqa"


def _attention(target: Target, module: Any, rows: int, pack: bool) -> Callable[[Tensor, BlockContext], Tensor]:
    if not restructures_attention(target):
        return ModuleAttention(module)
    return GroupedAttention(module, target.spec.num_heads, target.spec.num_kv_heads, rows=rows, pack=pack)


def _feed_forward(target: Target, mlp: Any, layer: int, rows: int, pack: bool) -> SwiGLU | None:
    """The dense block of a layer, or the shared experts of one with experts; None where it has none."""
    if layer not in target.spec.moe_layers:
        return SwiGLU.from_module(mlp, rows=rows, pack=pack)
    shared = target.family.shared
    return SwiGLU.from_module(getattr(mlp, shared), rows=rows, pack=pack) if shared else None


def _route(target: Target, mlp: nn.Module) -> Route:
    router: Any = getattr(mlp, target.family.router)
    by_sigmoid = target.family.routing == "sigmoid" and can_route_by_sigmoid(router)
    return sigmoid_route(router) if by_sigmoid else module_route(router)


def _gating(target: Target) -> Gating:
    if target.family.activation == "silu":
        return silu_gating
    config = target.model.config
    return clamped_gating(float(config.swiglu_alpha), float(config.swiglu_limit))


def _drafting(
    target: Target, mlp: Any, shared: SwiGLU | None, drafts: LayerDrafts | None, layer: int, pack: bool
) -> Callable[[Tensor], Tensor] | None:
    """What a draft step runs instead of the shared experts: these and the layer's scaled draft expert, as one wider
    block with half the kernel calls. None without draft experts.
    """
    if drafts is None:
        return None
    if not isinstance(drafts, DraftExperts):
        alone = partial(drafts.forward_layer, layer)
        return alone if shared is None else lambda x_TH: shared(x_TH) + alone(x_TH)
    weights: Any = drafts.experts[str(layer)]
    gates_up = [weights.gate_up.chunk(2)]
    downs = [(weights.down.float() * weights.scale.float()).to(weights.down.dtype)]
    if shared is not None:
        assert target.family.shared is not None
        module = getattr(mlp, target.family.shared)
        gates_up.insert(0, (module.gate_proj.weight, module.up_proj.weight))
        downs.insert(0, module.down_proj.weight)
    gate_up = torch.cat([part for parts in zip(*gates_up, strict=True) for part in parts])
    return SwiGLU(gate_up, torch.cat(downs, dim=1), rows=1, pack=pack)


def _norm(target: Target, module: Any) -> Callable[[Tensor], Tensor]:
    if not restructures_attention(target):
        return module
    weight, eps, shape = module.weight, module.variance_epsilon, module.weight.shape
    return lambda x_TH: F.rms_norm(x_TH, shape, weight, eps)
