"""The target's draft path, differentiable: what distillation trains and what acceptance is measured with in batches.

A `DraftPath` replaces the forward of every MoE block of a transformers model. In `target` mode a block computes
equation 4 and can record what the losses need; in `draft` mode equation 5, and it adds to equations 7 and 10.

Shapes: T tokens, H hidden size, E experts, k experts a token, R routed experts a drafted token uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moexp.learn.core.experts import by_gate, set_training_experts
from moexp.learn.draft_expert.losses import LayerLosses, Scoring, residual_loss, router_loss
from moexp.target.draft_expert import DraftExperts
from moexp.target.families import Family, family_of


@dataclass
class LayerTeacher:
    """One layer of the target: router logits, its choice by descending gate, and the residual m* of equation 6."""

    router_logits_TE: Tensor
    index_Tk: Tensor
    residual_TH: Tensor | None


class DraftPath:
    """Switches a model between the target and its draft path.

    Args:
        model: frozen causal language model with its experts in memory.
        experts: the draft experts; None drafts with shared + top-r alone.
        same_kernels: compute the routed experts of a draft as the target's, for measuring: the rounding of two kernels
            alone flips one argmax in twenty. Training takes the faster.

    Paper: DraftExpert eq. 4; DraftExpert eq. 5.
    """

    def __init__(
        self, model: PreTrainedModel, experts: DraftExperts | None, top_r: int = 1, *, same_kernels: bool = False
    ) -> None:
        self.spec = set_training_experts(model)
        self.family: Family = family_of(model.config.model_type)
        self.model, self.experts, self.top_r = model, experts, top_r
        self.scoring: Scoring = "sigmoid" if self.family.routing == "sigmoid" else "softmax"
        self.same_kernels = same_kernels
        self.mode: Literal["target", "draft"] = "target"
        self.teacher: dict[int, LayerTeacher] = {}
        self.predicted: dict[int, Tensor] = {}
        """What the routers of the last draft pass chose, [T, k] by layer."""
        self._losses: LayerLosses | None = None
        self._warm_up_errors: list[float] | None = None
        self._recorded: Literal["none", "routing", "all"] = "none"
        for layer in self.spec.moe_layers:
            block = model.model.layers[layer].mlp
            block.forward = self._block_forward(layer, block)

    @contextmanager
    def recording(self, what: Literal["routing", "all"]) -> Iterator[dict[int, LayerTeacher]]:
        """Target passes inside record their routing, and with `all` the residual that top-1 leaves out.

        Paper: DraftExpert eq. 6.
        """
        self.teacher, self._recorded = {}, what
        try:
            yield self.teacher
        finally:
            self._recorded = "none"

    @contextmanager
    def warming_up(self) -> Iterator[list[float]]:
        """Target passes inside compute the gradient of each layer's residual loss; gives these losses."""
        self._warm_up_errors = []
        try:
            with self.recording("all"):
                yield self._warm_up_errors
        finally:
            self._warm_up_errors = None

    @contextmanager
    def drafting(self, losses: bool = False) -> Iterator[LayerLosses]:
        """Passes inside take the draft path; with `losses`, each block adds to the sums against `self.teacher`."""
        zero = torch.zeros((), device=self.model.device)
        sums = LayerLosses(zero, zero.clone())
        self.mode, self._losses = "draft", sums if losses else None
        try:
            yield sums
        finally:
            self.mode, self._losses = "target", None

    def _block_forward(self, layer: int, block: nn.Module) -> Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]:
        """What replaces the forward of a MoE block."""
        router = getattr(block, self.family.router)
        routed = getattr(block, self.family.experts)
        shared = getattr(block, self.family.shared) if self.family.shared else None

        def top(r: int, hidden_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
            inputs = hidden_TH, index_Tk[:, :r].contiguous(), weight_Tk[:, :r].contiguous()
            output_TH: Tensor = (
                routed(*inputs) if self.same_kernels else ALL_EXPERTS_FUNCTIONS["grouped_mm"](routed, *inputs)
            )
            return output_TH

        def forward(hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            hidden_TH = hidden.reshape(-1, hidden.shape[-1])
            logits_TE, weight_Tk, index_Tk = router(hidden_TH)
            weight_Tk, index_Tk = by_gate(weight_Tk, index_Tk)
            base_TH = shared(hidden_TH) if shared is not None else torch.zeros_like(hidden_TH)
            if self.mode == "target":
                routed_TH = routed(hidden_TH, index_Tk, weight_Tk).to(base_TH.dtype)
                output_TH = base_TH + routed_TH
                if self._recorded != "none":
                    residual_TH = None
                    if self._recorded == "all":
                        residual_TH = routed_TH - top(1, hidden_TH, index_Tk, weight_Tk).to(routed_TH.dtype)
                        self._warm_up(layer, hidden_TH, residual_TH)
                    self.teacher[layer] = LayerTeacher(logits_TE, index_Tk, residual_TH)
            else:
                output_TH = base_TH + top(self.top_r, hidden_TH, index_Tk, weight_Tk).to(base_TH.dtype)
                self.predicted[layer] = index_Tk
                if self.experts is not None:
                    draft_TH = self.experts.forward_layer(layer, hidden_TH)
                    output_TH = output_TH + draft_TH
                    self._add_losses(layer, draft_TH, logits_TE)
            output = output_TH.view_as(hidden)
            return (output, weight_Tk) if self.family.mlp_returns_scores else output

        return forward

    def _warm_up(self, layer: int, hidden_TH: Tensor, residual_TH: Tensor) -> None:
        """One layer's share of the residual warm-up, backward at once."""
        if self._warm_up_errors is None or self.experts is None:
            return
        with torch.enable_grad(), torch.autocast(hidden_TH.device.type, dtype=torch.bfloat16):
            error = residual_loss(self.experts.forward_layer(layer, hidden_TH.detach()), residual_TH)
            error.backward()
        self._warm_up_errors.append(float(error.detach()))

    def _add_losses(self, layer: int, draft_TH: Tensor, logits_TE: Tensor) -> None:
        if (sums := self._losses) is None:
            return
        teacher = self.teacher[layer]
        if teacher.residual_TH is not None:
            sums.residual = sums.residual + residual_loss(draft_TH, teacher.residual_TH)
        sums.router = sums.router + router_loss(teacher.router_logits_TE, logits_TE, self.scoring)
