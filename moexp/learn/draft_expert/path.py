"""The target's draft path, differentiable: what distillation trains and what acceptance is measured with in batches.

A `DraftPath` takes over the forward of every MoE block of a transformers model (experts in memory). In `target`
mode a block computes equation 4 and can keep what the losses need of it; in `draft` mode it computes equation 5 and
adds its own share of equations 7 and 10. Attention, norms and head stay transformers' own.

Shapes: T tokens, H hidden size, E experts, k experts a token, R routed experts a drafted token uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moexp.base import ranks
from moexp.learn.core.experts import training_implementation
from moexp.target.draft_expert import DraftExperts
from moexp.target.families import Family, family_of
from moexp.target.spec import MoESpec

Scoring = Literal["softmax", "sigmoid"]


@dataclass
class LayerTeacher:
    """What the target did in one layer: router logits [T, E] and the residual m* [T, H] of equation 6."""

    router_logits_TE: Tensor
    residual_TH: Tensor | None


@dataclass
class LayerLosses:
    """Sums over the layers of one draft pass; the means over tokens are already taken."""

    residual: Tensor
    router: Tensor
    overlap: list[float] = field(default_factory=list)


def router_distribution(logits_TE: Tensor, scoring: Scoring) -> Tensor:
    """R_l of equation 10 as log-probabilities [T, E]: softmax, or sigmoid scores normalised to one."""
    if scoring == "softmax":
        return logits_TE.float().log_softmax(-1)
    log_score_TE = nn.functional.logsigmoid(logits_TE.float())
    return log_score_TE - log_score_TE.logsumexp(-1, keepdim=True)


def _as_the_target(routed: nn.Module, hidden_TH: Tensor, index_Tr: Tensor, weight_Tr: Tensor) -> Tensor:
    output_TH: Tensor = routed(hidden_TH, index_Tr, weight_Tr)
    return output_TH


def relative_error(made_TH: Tensor, wanted_TH: Tensor) -> Tensor:
    """Mean over tokens of |made - wanted|^2, each relative to a robust mean of its own power and the batch's.

    Equation 7 sums squares as they are. Dividing by the power lets one weight serve all layers, and keeps the few
    tokens with huge activations (the first of a text above all) from being all that is learned.
    """
    wanted_TH = wanted_TH.float()
    power_T = wanted_TH.square().sum(-1)
    error_T = (made_TH.float() - wanted_TH).square().sum(-1)
    median = ranks.concatenated(power_T).median()
    return (error_T / (power_T + median + 1e-12)).mean() * 2


class DraftPath:
    """Switches a model between the target and its draft path.

    Args:
        model: frozen causal language model with its experts in memory.
        experts: the draft experts; None drafts with shared + top-r alone.
        top_r: routed experts a drafted token uses.
        same_kernels: compute the routed experts of a draft as the target's are computed, for measuring: otherwise the
            rounding of two kernels alone flips routings, and with them one argmax in twenty. Training takes the faster.
    """

    def __init__(
        self, model: PreTrainedModel, experts: DraftExperts | None, top_r: int = 1, *, same_kernels: bool = False
    ) -> None:
        self.spec = MoESpec.from_config(model.config)
        self.family: Family = family_of(model.config.model_type)
        self.model, self.experts, self.top_r = model, experts, top_r
        self.scoring: Scoring = "sigmoid" if self.family.routing == "sigmoid" else "softmax"
        self.same_kernels = same_kernels
        self.mode: Literal["target", "draft"] = "target"
        self.teacher: dict[int, LayerTeacher] = {}
        self.losses: LayerLosses | None = None
        self.predicted: dict[int, Tensor] | None = None
        self.warming: list[float] | None = None
        self._keep: Literal["none", "routing", "all"] = "none"
        model.set_experts_implementation(training_implementation(self.spec.num_experts, self.spec.expert_width))
        for layer in self.spec.moe_layers:
            block = model.model.layers[layer].mlp
            block.forward = self._block_forward(layer, block)

    @contextmanager
    def recording(self, keep: Literal["routing", "all"]) -> Iterator[dict[int, LayerTeacher]]:
        """Target passes inside keep their router logits, and with `all` the residual of equation 6."""
        self.teacher, self._keep = {}, keep
        try:
            yield self.teacher
        finally:
            self._keep = "none"

    @contextmanager
    def drafting(self, losses: bool = False) -> Iterator[LayerLosses]:
        """Passes inside take the draft path; with `losses`, each block adds to the sums against `self.teacher`."""
        zero = torch.zeros((), device=self.model.device)
        sums = LayerLosses(zero, zero.clone())
        self.mode, self.losses = "draft", sums if losses else None
        try:
            yield sums
        finally:
            self.mode, self.losses = "target", None

    def _block_forward(self, layer: int, block: nn.Module) -> Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]:
        """What replaces the forward of a MoE block."""
        router = getattr(block, self.family.router)
        routed = getattr(block, self.family.experts)
        shared = getattr(block, self.family.shared) if self.family.shared else None
        few = _as_the_target if self.same_kernels else ALL_EXPERTS_FUNCTIONS["grouped_mm"]

        def forward(hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            output, scores = both(hidden)
            return (output, scores) if self.family.mlp_returns_scores else output

        def both(hidden: Tensor) -> tuple[Tensor, Tensor]:
            hidden_TH = hidden.reshape(-1, hidden.shape[-1])
            logits_TE, weight_Tk, index_Tk = router(hidden_TH)
            weight_Tk, order_Tk = weight_Tk.sort(dim=-1, descending=True, stable=True)
            index_Tk = index_Tk.gather(1, order_Tk)
            base_TH = shared(hidden_TH) if shared is not None else torch.zeros_like(hidden_TH)
            if self.mode == "target":
                routed_TH = routed(hidden_TH, index_Tk, weight_Tk).to(base_TH.dtype)
                if self._keep != "none" or self.warming is not None:
                    residual_TH = None
                    if self._keep == "all" or self.warming is not None:
                        top1_TH = few(routed, hidden_TH, index_Tk[:, :1], weight_Tk[:, :1])
                        residual_TH = routed_TH - top1_TH.to(routed_TH.dtype)
                    self.teacher[layer] = LayerTeacher(logits_TE, residual_TH)
                    if self.warming is not None and residual_TH is not None:
                        self._warm_up(self.warming, layer, hidden_TH, residual_TH)
                return (base_TH + routed_TH).view_as(hidden), weight_Tk
            r = self.top_r
            routed_TH = few(routed, hidden_TH, index_Tk[:, :r].contiguous(), weight_Tk[:, :r].contiguous())
            output_TH = base_TH + routed_TH.to(base_TH.dtype)
            if self.predicted is not None:
                self.predicted[layer] = index_Tk
            if self.experts is not None:
                made_TH = self.experts.forward_layer(layer, hidden_TH)
                output_TH = output_TH + made_TH
                if self.losses is not None:
                    self._add_losses(self.losses, layer, made_TH, logits_TE)
            return output_TH.view_as(hidden), weight_Tk

        return forward

    def _warm_up(self, errors: list[float], layer: int, hidden_TH: Tensor, residual_TH: Tensor) -> None:
        """One layer's share of the residual warm-up: learn m* from the target's own hidden states, backward at once."""
        assert self.experts is not None
        with torch.enable_grad(), torch.autocast(hidden_TH.device.type, dtype=torch.bfloat16):
            made_TH = self.experts.forward_layer(layer, hidden_TH.detach())
            error = relative_error(made_TH, residual_TH)
            error.backward()
        errors.append(float(error.detach()))

    def _add_losses(self, sums: LayerLosses, layer: int, made_TH: Tensor, logits_TE: Tensor) -> None:
        teacher = self.teacher[layer]
        if teacher.residual_TH is not None:
            sums.residual = sums.residual + relative_error(made_TH, teacher.residual_TH)
        log_p_TE = router_distribution(teacher.router_logits_TE, self.scoring)
        log_q_TE = router_distribution(logits_TE, self.scoring)
        sums.router = sums.router + (log_p_TE.exp() * (log_p_TE - log_q_TE)).sum(-1).mean()
