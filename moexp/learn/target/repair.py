"""Repairs a carved model by distillation from the dense model it came from.

First every MoE block learns the dense FFN's output on the dense model's hidden states, and routing by the energy of the
neurons it was given. Then the model learns the dense next-token distribution end to end; last, for a small delta, with
the weights that the delta will give back. A selection bias (DeepSeek-V3) keeps all experts in use.

Shapes: B rows, L tokens a row, T = B x L, H hidden size, E experts, n neurons an expert received, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Glm4MoeForCausalLM, LlamaForCausalLM

from moexp.learn.core.experts import hooked, set_training_experts
from moexp.learn.core.logit_loss import logit_loss
from moexp.learn.core.loop import UNSAVED, Metrics, Run, Schedule, own_rows, train
from moexp.learn.core.optimizers import Updates
from moexp.learn.target.routing import LoadBalancer, RoutingLocality
from moexp.target.carve import LayerPlan
from moexp.target.delta import as_delivered, kind_of


@dataclass(frozen=True)
class RepairSettings:
    """All stages."""

    layerwise: Schedule
    end_to_end: Schedule
    delta: Schedule | None = None
    density: float = 0.14  # of the delta, for its stage
    layerwise_rows: int = 4  # corpus rows a batch, of the first stage and of the others
    rows: int = 8
    router_weight: float = 0.05
    bias_rate: float = 1e-3  # by which the load-balancing bias moves
    locality: float = 0.0  # weight of `RoutingLocality`, end to end
    seed: int = 0


def prepare(student: Glm4MoeForCausalLM, scope: Literal["all", "delta"] = "all") -> None:
    """Readies a carved model for all stages: the tied embedding frozen, with scope `delta` all that no delta holds."""
    set_training_experts(student)
    student.get_input_embeddings().requires_grad_(False)
    if scope == "delta":
        for name, parameter in student.named_parameters():
            if kind_of(name) == "dense":
                parameter.requires_grad_(False)
    student.train()


def moe_layers(model: Glm4MoeForCausalLM) -> dict[int, Any]:
    """The MoE blocks by layer."""
    layers = enumerate(model.model.layers)
    return {index: layer.mlp for index, layer in layers if hasattr(layer.mlp, "experts")}


def repair_layerwise(
    student: Glm4MoeForCausalLM,
    dense: LlamaForCausalLM,
    plans: list[LayerPlan],
    corpus_NL: Tensor,
    settings: RepairSettings,
    run: Run = UNSAVED,
) -> None:
    """Stage one, in place: each MoE block (fp32) against the dense FFN, on the dense model's hidden states.

    `plans` tell which neurons each expert of a MoE layer received.
    """
    blocks = moe_layers(student)
    students: dict[Any, Any] = {dense.model.layers[layer].mlp: block for layer, block in blocks.items()}
    energy_of = {
        mlp.down_proj: (mlp.down_proj.weight.float().norm(dim=0), plan.own_En)
        for mlp, plan in zip(students, plans, strict=True)
    }
    energies: dict[nn.Module, Tensor] = {}
    errors: list[float] = []

    def keep_energy(down_proj: nn.Module, args: tuple[Tensor, ...]) -> None:
        norm_N, groups_En = energy_of[down_proj]
        contribution_TN = args[0].flatten(0, 1).float() * norm_N
        groups_TEn = contribution_TN.square()[:, groups_En.flatten()].unflatten(1, groups_En.shape)
        energies[down_proj] = groups_TEn.sum(-1)

    def learn_block(mlp: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        x_TH, y_TH = args[0].flatten(0, 1).detach(), output.flatten(0, 1).detach().float()
        errors.append(_learn_block(students[mlp], x_TH, y_TH, energies.pop(mlp.down_proj), settings.router_weight))

    balancer = LoadBalancer(student, settings.bias_rate)

    def step_fn(step: int) -> Metrics:
        errors.clear()
        rows = own_rows(corpus_NL, settings.layerwise_rows, step, settings.seed).long()
        with torch.no_grad():
            dense.model(input_ids=rows, use_cache=False)
        return {"residual": sum(errors) / len(errors), "load": balancer.update()}

    named = {
        f"{layer}.{name}": parameter for layer, block in blocks.items() for name, parameter in block.named_parameters()
    }
    # one clip over all layers would let one layer's spike starve the others: the loss of each is its own
    updates = Updates(clip=100.0)
    with balancer.watching(), hooked(energy_of, keep_energy, before=True), hooked(students, learn_block):
        train(named, settings.layerwise, step_fn, updates, run, balancer.state())


def _learn_block(block: Any, x_TH: Tensor, y_TH: Tensor, energy_TE: Tensor, router_weight: float) -> float:
    """Gradients of a MoE block against the dense FFN's output y for inputs x; returns the error of its output."""
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output_TH = block(x_TH[None])[0].float()
        # the first token's huge activations would drown the others: each token counts relative to a robust scale
        weight_T1 = 1.0 / (y_TH.square().sum(-1, keepdim=True) + y_TH.square().sum(-1).median())
        residual = ((output_TH - y_TH).square() * weight_T1).sum(-1).mean() * 2
        router_logits_TE = F.linear(x_TH.float(), block.gate.weight.float())
        share_TE = energy_TE / energy_TE.sum(-1, keepdim=True).clamp_min(1e-12)
        routing = -(share_TE * F.log_softmax(router_logits_TE, dim=-1)).sum(-1).mean()
        (residual + router_weight * routing).backward()
    return float(residual.detach())


def repair_end_to_end(
    student: Glm4MoeForCausalLM,
    dense: LlamaForCausalLM,
    corpus_NL: Tensor,
    settings: RepairSettings,
    bases: Mapping[str, Tensor] | None = None,
    run: Run = UNSAVED,
) -> None:
    """Stages two and three, in place: the model (fp32, embedding frozen) against the dense next-token distribution.

    Given `bases`, the carved weights before repair by parameter, this is stage three: each step computes with what a
    delta would give back, and its gradient moves the weights themselves (straight-through).
    """
    balancer = LoadBalancer(student, settings.bias_rate)
    locality = RoutingLocality(student, corpus_NL.shape[1]) if settings.locality else None
    head_VH = dense.lm_head.weight.bfloat16()
    student_head_VH = student.lm_head.weight.detach().bfloat16()
    schedule = settings.end_to_end if bases is None else settings.delta
    assert schedule is not None

    def step_fn(step: int) -> Metrics:
        shuffle = settings.seed + (1 if bases is None else 2)
        rows = own_rows(corpus_NL, settings.rows, step, shuffle).long()
        with torch.no_grad():
            teacher_TH = dense.model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
        with nullcontext() if bases is None else delivered(student, bases, settings.density):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                student_TH = student.model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
            result = logit_loss(student_TH.bfloat16(), teacher_TH, student_head_VH, head_VH)
            loss = result.loss / result.tokens
            metrics = {"kl": result.kl / result.tokens, "agreement": result.agree / result.tokens}
            if locality is not None:
                moved = locality.take()
                loss = loss + settings.locality * moved
                metrics["moved"] = float(moved.detach())
            loss.backward()
        return {**metrics, "load": balancer.update()}

    named = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    with balancer.watching(), nullcontext() if locality is None else locality.watching():
        train(named, schedule, step_fn, run=run, extra=balancer.state())


@contextmanager
def delivered(student: Glm4MoeForCausalLM, bases: Mapping[str, Tensor], density: float) -> Iterator[None]:
    """Inside, the parameters named in `bases` hold what a delta of them would give back."""
    latents = {name: parameter for name, parameter in student.named_parameters() if name in bases}
    weights = {name: parameter.data for name, parameter in latents.items()}
    try:
        with torch.no_grad():
            for name, parameter in latents.items():
                parameter.data = as_delivered(name, weights[name], bases[name].float(), density).contiguous()
        yield
    finally:
        for name, parameter in latents.items():
            parameter.data = weights[name]
