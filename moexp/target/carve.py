"""Carves a dense SwiGLU language model into a mixture of experts, neuron by neuron.

Every FFN neuron keeps its weights: the most active ones become the shared expert, the others are split into routed
experts of neurons that fire together. With all experts active the carved model computes what the dense one
computes; with top-k of them a router decides which neurons matter for a token. The result is a plain
`Glm4MoeForCausalLM` (sigmoid router with bias correction, normalised gates).

Shapes: T tokens, H hidden size, N FFN neurons of the dense layer, E routed experts, I width of one expert, S
neurons of the shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaForCausalLM

from moexp.base.errors import MoexpError
from moexp.base.ridge import solve_ridge

ROUTER_RIDGE = 1e-2
COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Values of the config that the carved model has of the dense one."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a carved layer. `expert_width` may exceed the neurons an expert receives: the rest are spares,
    which copy the input side of neurons that others own and start at zero output.
    """

    shared_neurons: int
    routed_experts: int
    top_k: int
    expert_width: int
    cluster_rounds: int = 4

    def neurons_per_expert(self, dense_neurons: int) -> int:
        """Neurons each routed expert receives.

        Raises:
            MoexpError: the neurons cannot be split so.
        """
        routed = dense_neurons - self.shared_neurons
        if routed <= 0 or routed % self.routed_experts:
            raise MoexpError(
                f"{dense_neurons} - {self.shared_neurons} neurons do not split into {self.routed_experts} experts",
                where="target.carve",
                valid=f"shared_neurons = {dense_neurons} - n x {self.routed_experts}",
            )
        if self.shared_neurons % self.expert_width or routed // self.routed_experts > self.expert_width:
            raise MoexpError(
                f"expert_width {self.expert_width} does not fit",
                where="target.carve.expert_width",
                valid=f"a divisor of shared_neurons, at least {routed // self.routed_experts}",
            )
        return routed // self.routed_experts


@dataclass
class Calibration:
    """What one dense layer did on the calibration tokens: inputs [T, H] and neuron activations [T, N]."""

    inputs_TH: Tensor
    activations_TN: Tensor


@dataclass
class LayerPlan:
    """Where the neurons of one dense FFN go: shared [S], to each expert its own [E, n], and copied as spares [E, m]."""

    shared_S: Tensor
    own_En: Tensor
    spare_Em: Tensor


@torch.no_grad()
def calibrate(dense: LlamaForCausalLM, batches: Iterator[Tensor], layers: range) -> list[Calibration]:
    """Runs the dense model over token batches [B, L] and keeps each layer's FFN inputs and activations (bf16)."""
    seen: dict[torch.nn.Module, list[Tensor]] = {}

    def keep(module: torch.nn.Module, args: tuple[Tensor]) -> None:
        seen.setdefault(module, []).append(args[0].flatten(0, 1).bfloat16())

    blocks: list[Any] = [dense.model.layers[layer].mlp for layer in layers]
    handles = [module.register_forward_pre_hook(keep) for block in blocks for module in (block, block.down_proj)]
    try:
        for tokens_BL in batches:
            dense.model(input_ids=tokens_BL, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [Calibration(torch.cat(seen[block]), torch.cat(seen[block.down_proj])) for block in blocks]


def split_neurons(contribution_TN: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Which neurons are shared [S], and which belong to each routed expert [E, n].

    Args:
        contribution_TN: |activation| times the norm of the neuron's down-projection column.
    """
    neurons = contribution_TN.shape[1]
    per_expert = geometry.neurons_per_expert(neurons)
    order_N = contribution_TN.float().pow(2).mean(0).argsort(descending=True, stable=True)
    shared_S, routed_R = order_N[: geometry.shared_neurons], order_N[geometry.shared_neurons :]
    groups_En = balanced_clusters(
        contribution_TN[:, routed_R].float(), geometry.routed_experts, per_expert, geometry.cluster_rounds
    )
    return shared_S.sort().values, routed_R[groups_En].sort(dim=1).values


def balanced_clusters(activity_TR: Tensor, clusters: int, size: int, rounds: int) -> Tensor:
    """Balanced k-means of neurons by co-activation: [clusters, size] column indices.

    Each round solves the assignment of neurons to clusters exactly (each has `size` slots), so no cluster ends up empty
    or full of leftovers. Neurons are compared by the cosine of their activity over tokens, in
    a random projection that keeps it.
    """
    generator = torch.Generator().manual_seed(0)
    projection_TD = torch.randn(activity_TR.shape[0], 128, generator=generator)
    points_RD = F.normalize((activity_TR - activity_TR.mean(0)).T @ projection_TD, dim=-1)
    centres_CD = points_RD[torch.randperm(points_RD.shape[0], generator=generator)[:clusters]]
    labels_R = np.zeros(points_RD.shape[0], dtype=np.int64)
    for _ in range(rounds):
        cost_RP = -(points_RD @ centres_CD.T).repeat_interleave(size, dim=1).numpy()
        rows, slots = linear_sum_assignment(cost_RP)
        labels_R[rows] = slots // size
        members_CR = F.one_hot(torch.from_numpy(labels_R), clusters).T.float()
        centres_CD = F.normalize(members_CR @ points_RD, dim=-1)
    return torch.from_numpy(np.stack([np.flatnonzero(labels_R == cluster) for cluster in range(clusters)]))


def fit_router(inputs_TH: Tensor, energy_TE: Tensor) -> Tensor:
    """A linear router [E, H] that predicts each expert's log energy, centred over experts.

    Ridge regression without intercept (the router has none): the mean of the hidden states carries it. A start for
    the distillation that follows.
    """
    target_TE = energy_TE.clamp_min(1e-8).log()
    target_TE = target_TE - target_TE.mean(1, keepdim=True)
    x_TH = inputs_TH.float()
    return solve_ridge(x_TH.T @ x_TH, x_TH.T @ target_TE, ROUTER_RIDGE).T.contiguous()


def carved_config(dense: LlamaForCausalLM, geometry: Geometry) -> Glm4MoeConfig:
    """The configuration of the carved model: the dense model's attention, GLM-4-MoE's experts and router."""
    source: Any = dense.config
    build: Any = Glm4MoeConfig  # its signature does not list what the base class takes
    config: Glm4MoeConfig = build(
        **{name: getattr(source, name) for name in COPIED},
        moe_intermediate_size=geometry.expert_width,
        rope_parameters={**source.rope_parameters, "partial_rotary_factor": 1.0},
        partial_rotary_factor=1.0,
        attention_bias=False,
        use_qk_norm=False,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        n_routed_experts=geometry.routed_experts,
        num_experts_per_tok=geometry.top_k,
        n_shared_experts=geometry.shared_neurons // geometry.expert_width,
        routed_scaling_factor=float(geometry.top_k),
        norm_topk_prob=True,
    )
    return config


@torch.no_grad()
def carve(
    dense: LlamaForCausalLM,
    calibration: list[Calibration],
    geometry: Geometry,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> tuple[Glm4MoeForCausalLM, list[LayerPlan]]:
    """The carved model in fp32, routers fitted, not yet repaired, and how each layer was split.

    `calibration` covers layers 1 and up.
    """
    plans: list[LayerPlan] = []
    routers: list[Tensor] = []
    for layer, seen in enumerate(calibration, start=1):
        down_HN = dense.model.layers[layer].mlp.down_proj.weight.float()
        contribution_TN = seen.activations_TN.float().abs() * down_HN.norm(dim=0)
        plan = plan_layer(contribution_TN, geometry)
        energy_TE = contribution_TN[:, plan.own_En.flatten()].pow(2).unflatten(1, plan.own_En.shape).sum(-1)
        routers.append(fit_router(seen.inputs_TH, energy_TE))
        plans.append(plan)
        on_layer(layer)
    model = carve_as_planned(dense, plans, geometry)
    for layer, router_EH in enumerate(routers, start=1):
        model.model.layers[layer].mlp.gate.weight.copy_(router_EH)
    return model, plans


def plan_layer(contribution_TN: Tensor, geometry: Geometry) -> LayerPlan:
    """Splits a layer's neurons by what they contributed [T, N], and finds each expert's spares.

    A spare is a neuron of another expert that was most active where this expert would be chosen and its owner not.
    """
    shared_S, own_En = split_neurons(contribution_TN, geometry)
    energy_TN = contribution_TN.float().pow(2)
    energy_TE = energy_TN[:, own_En.flatten()].unflatten(1, own_En.shape).sum(-1)
    chosen_TE = torch.zeros_like(energy_TE).scatter_(1, energy_TE.topk(geometry.top_k, dim=-1).indices, 1.0)
    owned_TR = (1.0 - chosen_TE).repeat_interleave(own_En.shape[1], dim=1)  # columns in the order of own_En
    missed_ER = chosen_TE.T @ (energy_TN[:, own_En.flatten()] * owned_TR)
    missed_ER.view(*own_En.shape[:1], *own_En.shape).diagonal(dim1=0, dim2=1).fill_(-1.0)  # its own neurons
    spares = min(geometry.expert_width - own_En.shape[1], own_En.numel() - own_En.shape[1])
    best_Em = missed_ER.argsort(dim=1, descending=True, stable=True)[:, :spares]
    return LayerPlan(shared_S, own_En, own_En.flatten()[best_Em])


@torch.no_grad()
def carve_as_planned(dense: LlamaForCausalLM, plans: list[LayerPlan], geometry: Geometry) -> Glm4MoeForCausalLM:
    """The carved model in fp32 with every neuron where its plan says; the routers are left at zero."""
    model = Glm4MoeForCausalLM(carved_config(dense, geometry)).float()
    state = {name: tensor.float() for name, tensor in dense.state_dict().items()}
    model.load_state_dict({name: state[name] for name in model.state_dict() if name in state}, strict=False)
    for layer, plan in enumerate(plans, start=1):
        prefix = f"model.layers.{layer}.mlp."
        gate_NH, up_NH, down_HN = (state[f"{prefix}{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        block = model.model.layers[layer].mlp
        block.shared_experts.gate_proj.weight.copy_(gate_NH[plan.shared_S])
        block.shared_experts.up_proj.weight.copy_(up_NH[plan.shared_S])
        block.shared_experts.down_proj.weight.copy_(down_HN[:, plan.shared_S])
        experts, width, own = block.experts, geometry.expert_width, plan.own_En.shape[1]
        inputs_EI = torch.cat([plan.own_En, plan.spare_Em], dim=1)
        filled = inputs_EI.shape[1]
        experts.gate_up_proj.zero_()
        experts.down_proj.zero_()
        experts.gate_up_proj[:, :filled] = gate_NH[inputs_EI]
        experts.gate_up_proj[:, width : width + filled] = up_NH[inputs_EI]
        experts.down_proj[:, :, :own] = down_HN[:, plan.own_En].permute(1, 0, 2)
        block.gate.weight.zero_()
        block.gate.e_score_correction_bias.zero_()
    return model
