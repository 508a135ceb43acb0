"""Repairs a carved model by distillation from the dense model it came from.

First every MoE block learns, on the dense model's own hidden states, to reproduce the dense FFN's output and to
route by the energy of the neurons it was given (all layers in one dense forward pass, no stored features). Then the
whole model learns the dense model's next-token distribution end to end; last, where the result is to be kept as a
small delta, it goes on learning with the weights that the delta will give back. A selection bias, moved after every
step towards an even load as in DeepSeek-V3, keeps all experts in use.

Shapes: B rows, L tokens a row, T = B x L, H hidden size, E experts, n neurons an expert received, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Glm4MoeForCausalLM, LlamaForCausalLM

from moexp.learn.core.experts import training_implementation
from moexp.learn.core.logit_loss import logit_loss
from moexp.learn.core.loop import Metrics, Schedule, batch_rows, train
from moexp.target.carve import LayerPlan
from moexp.target.delta import as_delivered, kind_of

OnStep = Callable[[int, Metrics], None]


@dataclass(frozen=True)
class RepairSettings:
    """All stages. the two `rows` are batches in rows of the corpus; `bias_rate` moves the load-balancing bias;
    `density` is that of the delta, for its stage; `locality` weighs `RoutingLocality` in the end-to-end stages.
    """

    layerwise: Schedule
    end_to_end: Schedule
    delta: Schedule | None = None
    density: float = 0.14
    layerwise_rows: int = 4
    rows: int = 8
    router_weight: float = 0.05
    bias_rate: float = 1e-3
    locality: float = 0.0
    seed: int = 0


def prepare(student: Glm4MoeForCausalLM, scope: Literal["all", "delta"] = "all") -> None:
    """Readies a carved model for all stages: a trainable experts implementation, the tied embedding frozen.

    With scope `delta` only what a delta holds is trained: MoE blocks, attention and norms.
    """
    student.set_experts_implementation(
        training_implementation(student.config.n_routed_experts, student.config.moe_intermediate_size)
    )
    for parameter in student.get_input_embeddings().parameters():
        parameter.requires_grad_(False)
    if scope == "delta":
        for name, parameter in student.named_parameters():
            if kind_of(name) == "dense":
                parameter.requires_grad_(False)
    student.train()


def moe_layers(model: Glm4MoeForCausalLM) -> dict[int, Any]:
    """The MoE blocks by layer."""
    layers = enumerate(model.model.layers)
    return {index: layer.mlp for index, layer in layers if hasattr(layer.mlp, "experts")}


class LoadBalancer:
    """Counts how often each expert is chosen and nudges the selection bias towards an even load."""

    def __init__(self, model: Glm4MoeForCausalLM, rate: float) -> None:
        self._rate = rate
        self._gates = [block.gate for block in moe_layers(model).values()]
        self._loads = [torch.zeros(gate.num_experts) for gate in self._gates]
        self._handles = [
            gate.register_forward_hook(self._counter(load)) for gate, load in zip(self._gates, self._loads, strict=True)
        ]

    @staticmethod
    def _counter(load_E: Tensor) -> Callable[..., None]:
        def count(_module: nn.Module, _args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            load_E.add_(torch.bincount(output[2].flatten(), minlength=len(load_E)))

        return count

    def update(self) -> float:
        """Moves the biases; returns the largest share of one layer's tokens that one expert took, over an even
        share.
        """
        worst = 0.0
        for gate, load_E in zip(self._gates, self._loads, strict=True):
            if load_E.sum() > 0:
                mean = load_E.mean()
                gate.e_score_correction_bias += self._rate * (mean - load_E).sign()
                worst = max(worst, float(load_E.max() / mean))
            load_E.zero_()
        return worst

    def state(self) -> dict[str, Tensor]:
        """The selection biases: no parameters, but what a resumed run must find as it left them."""
        return {str(number): gate.e_score_correction_bias for number, gate in enumerate(self._gates)}

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


class RoutingLocality:
    """How much of its routing a token shares with those before it, as a loss.

    Experts of real models specialise, so neighbouring tokens share some of theirs and the union over a block grows
    slower than chance would have it; experts cut out of a dense FFN have no reason to. The loss of a layer is the
    share of a token's routing that goes to experts which none of the `WINDOW` tokens before it has used. Only routers
    learn from it: hidden states that did would lose what tells tokens apart (tried: half a nat).
    """

    WINDOW = 4
    SHARPNESS = 0.05

    def __init__(self, model: Glm4MoeForCausalLM, row_length: int) -> None:
        self._terms: list[Tensor] = []
        self._length = row_length
        gates = [block.gate for block in moe_layers(model).values()]
        self._handles = [gate.register_forward_hook(self._keep) for gate in gates]

    def _keep(self, gate: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x_TH = args[0].detach().flatten(0, -2).float()
        with torch.autocast("cpu", enabled=False):
            score_TE = F.linear(x_TH, gate.weight.float()).sigmoid() + gate.e_score_correction_bias
        self._terms.append(new_share(score_TE, output[2], self._length, self.WINDOW, self.SHARPNESS))

    def take(self) -> Tensor:
        """The mean over layers of the forward pass that just ran."""
        mean = torch.stack(self._terms).mean()
        self._terms.clear()
        return mean

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


def new_share(score_TE: Tensor, index_Tk: Tensor, length: int, window: int, sharpness: float) -> Tensor:
    """Mean share of softmax(score / sharpness) on experts that none of the `window` tokens before in the row uses; the
    first `window` tokens of a row do not count.

    Args:
        score_TE: what selection goes by; differentiable. index_Tk: the k chosen.
        length: tokens a row, more than `window`.
    """
    used_BLE = torch.zeros_like(score_TE).scatter(1, index_Tk, 1.0).unflatten(0, (-1, length))
    recent_BLE = torch.stack([used_BLE[:, window - back : length - back] for back in range(1, window + 1)]).amax(0)
    share_BLE = (score_TE / sharpness).softmax(-1).unflatten(0, (-1, length))[:, window:]
    return 1.0 - (share_BLE * recent_BLE).sum(-1).mean()


def repair_layerwise(
    student: Glm4MoeForCausalLM,
    dense: LlamaForCausalLM,
    plans: list[LayerPlan],
    corpus_NL: Tensor,
    settings: RepairSettings,
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    on_step: OnStep = lambda step, metrics: None,
) -> None:
    """Stage one, in place: each MoE block (fp32) against the dense FFN, on the dense model's hidden states.

    Args:
        plans: where the neurons of each MoE layer went.
        corpus_NL: token rows, int.
        checkpoint: folder to resume from and to write to.
    """
    blocks = moe_layers(student)
    energies: dict[int, Tensor] = {}
    errors: list[float] = []
    handles = []
    for (layer, block), plan in zip(blocks.items(), plans, strict=True):
        mlp = dense.model.layers[layer].mlp
        norm_N = mlp.down_proj.weight.float().norm(dim=0)
        handles.append(mlp.down_proj.register_forward_pre_hook(_keep_energy(energies, layer, norm_N, plan.own_En)))
        handles.append(mlp.register_forward_hook(_learn_block(block, energies, layer, settings, errors)))
    balancer = LoadBalancer(student, settings.bias_rate)

    def step_fn(step: int) -> Metrics:
        errors.clear()
        rows = corpus_NL[batch_rows(len(corpus_NL), settings.layerwise_rows, step, settings.seed)].long()
        with torch.no_grad():
            dense.model(input_ids=rows, use_cache=False)
        return {"residual": sum(errors) / len(errors), "load": balancer.update()}

    names = {
        f"{layer}.{name}": parameter for layer, block in blocks.items() for name, parameter in block.named_parameters()
    }
    try:
        # one clip over all layers would let one layer's spike starve the others: the loss of each is its own
        train(
            names,
            settings.layerwise,
            step_fn,
            clip=100.0,
            checkpoint=checkpoint,
            identity=identity,
            extra=balancer.state(),
            on_step=on_step,
        )
    finally:
        balancer.close()
        for handle in handles:
            handle.remove()


def _keep_energy(energies: dict[int, Tensor], layer: int, norm_N: Tensor, groups_En: Tensor) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        contribution_TN = args[0].flatten(0, 1).float() * norm_N
        energies[layer] = contribution_TN.square()[:, groups_En.flatten()].unflatten(1, groups_En.shape).sum(-1)

    return hook


def _learn_block(
    block: Any, energies: dict[int, Tensor], layer: int, settings: RepairSettings, errors: list[float]
) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x_TH, y_TH = args[0].flatten(0, 1).detach(), output.flatten(0, 1).detach().float()
        energy_TE = energies.pop(layer)
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            made_TH = block(x_TH[None])[0].float()
            # the first token's huge activations would drown the others: each token counts relative to a robust scale
            weight_T1 = 1.0 / (y_TH.square().sum(-1, keepdim=True) + y_TH.square().sum(-1).median())
            residual = ((made_TH - y_TH).square() * weight_T1).sum(-1).mean() * 2
            router_logits_TE = F.linear(x_TH.float(), block.gate.weight.float())
            share_TE = energy_TE / energy_TE.sum(-1, keepdim=True).clamp_min(1e-12)
            routing = -(share_TE * F.log_softmax(router_logits_TE, dim=-1)).sum(-1).mean()
            (residual + settings.router_weight * routing).backward()
        errors.append(float(residual.detach()))

    return hook


def repair_end_to_end(
    student: Glm4MoeForCausalLM,
    dense: LlamaForCausalLM,
    corpus_NL: Tensor,
    settings: RepairSettings,
    *,
    bases: Mapping[str, Tensor] | None = None,
    checkpoint: Path | None = None,
    identity: str = "",
    on_step: OnStep = lambda step, metrics: None,
) -> None:
    """Stages two and three, in place: the whole model (fp32, embedding frozen) against the dense model's next-token
    distribution.

    Args:
        bases: the carved weights before repair, by parameter. Given, this is stage three: each step computes with
            what a delta of the weights would give back, and its gradient moves the weights themselves
            (straight-through).
    """
    balancer = LoadBalancer(student, settings.bias_rate)
    locality = RoutingLocality(student, corpus_NL.shape[1]) if settings.locality else None
    head_VH = dense.lm_head.weight.bfloat16()
    student_head_VH = student.lm_head.weight.detach().bfloat16()
    schedule = settings.end_to_end if bases is None else settings.delta
    assert schedule is not None

    def step_fn(step: int) -> Metrics:
        shuffle = settings.seed + (1 if bases is None else 2)
        rows = corpus_NL[batch_rows(len(corpus_NL), settings.rows, step, shuffle)].long()
        with torch.no_grad():
            teacher_TH = dense.model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
        with nullcontext() if bases is None else delivered(student, bases, settings.density):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                made_TH = student.model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
            result = logit_loss(made_TH.bfloat16(), teacher_TH, student_head_VH, head_VH)
            loss = result.loss / result.tokens
            metrics = {"kl": result.kl / result.tokens, "agreement": result.agree / result.tokens}
            if locality is not None:
                moved = locality.take()
                loss = loss + settings.locality * moved
                metrics["moved"] = float(moved.detach())
            loss.backward()
        return {**metrics, "load": balancer.update()}

    names = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    try:
        train(
            names,
            schedule,
            step_fn,
            checkpoint=checkpoint,
            identity=identity,
            extra=balancer.state(),
            on_step=on_step,
        )
    finally:
        balancer.close()
        if locality is not None:
            locality.close()


@contextmanager
def delivered(student: Glm4MoeForCausalLM, bases: Mapping[str, Tensor], density: float) -> Iterator[None]:
    """Inside, the parameters named in `bases` hold what a delta of them would give back."""
    latents = {name: parameter for name, parameter in student.named_parameters() if name in bases}
    kept = {name: parameter.data for name, parameter in latents.items()}
    try:
        with torch.no_grad():
            for name, parameter in latents.items():
                parameter.data = as_delivered(name, kept[name], bases[name].float(), density).contiguous()
        yield
    finally:
        for name, parameter in latents.items():
            parameter.data = kept[name]
