"""Watching the routers of a carved model in training: an even load, and experts shared with the tokens before.

Shapes: T tokens, H hidden size, E experts, k experts a token, B rows, L tokens a row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Glm4MoeForCausalLM

from moexp.learn.core.experts import hooked, routers

RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits [T, E], gates [T, k], ids [T, k]."""


def zero_loads(model: Glm4MoeForCausalLM) -> dict[Any, Tensor]:
    """A count of zero for each expert, [E] by router."""
    return {gate: torch.zeros(model.config.n_routed_experts) for gate in routers(model).values()}


def counting(loads: dict[Any, Tensor]) -> AbstractContextManager[None]:
    """Inside, forward passes add to `loads` how often each expert is chosen."""

    def count(gate: nn.Module, _args: tuple[Tensor, ...], output: RouterOutput) -> None:
        loads[gate].add_(torch.bincount(output[2].flatten(), minlength=len(loads[gate])))

    return hooked(loads, count)


class LoadBalancer:
    """Nudges the selection bias of routers towards an even load."""

    def __init__(self, model: Glm4MoeForCausalLM, rate: float) -> None:
        self._loads, self._rate = zero_loads(model), rate

    def watching(self) -> AbstractContextManager[None]:
        """Inside, forward passes count towards the next update."""
        return counting(self._loads)

    def update(self) -> float:
        """Moves the biases by the load since the last update; returns the busiest expert's share over an even one."""
        worst = 0.0
        for gate, load_E in self._loads.items():
            if load_E.sum() > 0:
                mean = load_E.mean()
                gate.e_score_correction_bias += self._rate * (mean - load_E).sign()
                worst = max(worst, float(load_E.max() / mean))
            load_E.zero_()
        return worst

    def state(self) -> dict[str, Tensor]:
        """The selection biases, which a checkpoint must save."""
        return {str(number): gate.e_score_correction_bias for number, gate in enumerate(self._loads)}


class RoutingLocality:
    """How much of its routing a token shares with those before it, as a loss.

    Neighbouring tokens of real models share experts; experts cut out of a dense FFN have no reason to. A layer's loss
    is the share of a token's routing to experts that none of the `WINDOW` tokens before has used. Only routers learn
    from it: hidden states that did would lose what tells tokens apart (measured: half a nat).
    """

    WINDOW = 4
    SHARPNESS = 0.05

    def __init__(self, model: Glm4MoeForCausalLM, row_length: int) -> None:
        self._gates = routers(model).values()
        self._terms: list[Tensor] = []
        self._length = row_length

    def watching(self) -> AbstractContextManager[None]:
        """Inside, forward passes add to the loss."""
        return hooked(self._gates, self._keep)

    def _keep(self, gate: Any, args: tuple[Tensor, ...], output: RouterOutput) -> None:
        x_TH = args[0].detach().flatten(0, -2).float()
        with torch.autocast("cpu", enabled=False):
            score_TE = F.linear(x_TH, gate.weight.float()).sigmoid() + gate.e_score_correction_bias
        self._terms.append(new_share(score_TE, output[2], self._length, self.WINDOW, self.SHARPNESS))

    def take(self) -> Tensor:
        """The mean over layers of the forward pass that just ran."""
        mean = torch.stack(self._terms).mean()
        self._terms.clear()
        return mean


def new_share(score_TE: Tensor, index_Tk: Tensor, length: int, window: int, sharpness: float) -> Tensor:
    """Mean share of softmax(score / sharpness) on experts that none of the `window` tokens before in the row uses.

    Differentiable in `score_TE`. The first `window` of a row's `length` tokens do not count.
    """
    used_BLE = torch.zeros_like(score_TE).scatter(1, index_Tk, 1.0).unflatten(0, (-1, length))
    recent_BLE = torch.stack([used_BLE[:, window - back : length - back] for back in range(1, window + 1)]).amax(0)
    share_BLE = (score_TE / sharpness).softmax(-1).unflatten(0, (-1, length))[:, window:]
    return 1.0 - (share_BLE * recent_BLE).sum(-1).mean()
