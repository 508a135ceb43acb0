"""The optimisers of the training loop: AdamW, or Muon for matrices with AdamW for the rest.

Muon (torch's own) replaces a matrix's momentum by the nearest orthogonal matrix, scaled so that an update is as large
as AdamW's: the same learning rates serve both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimizerName = Literal["adamw", "muon"]
STATE = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
"""What an optimiser keeps of a parameter."""


VOCABULARY = ("embed_tokens", "lm_head")


class Optimizers:
    """Updates named parameters, and gives or takes back what it keeps of each by name.

    Args:
        named: the parameters.
        scales: multiplies the learning rate, by name.
        kind: "muon" updates the matrices among them by Muon, but for embeddings and projections to a vocabulary (a name
            with one of `VOCABULARY`): their rows are tokens, which it would make learn alike however rare they are.
        betas: AdamW's.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        scales: Mapping[str, float],
        kind: OptimizerName,
        betas: tuple[float, float],
    ) -> None:
        self.named = named
        matrices = {
            name
            for name, parameter in named.items()
            if kind == "muon" and parameter.ndim == 2 and not any(part in name for part in VOCABULARY)
        }
        parts: list[tuple[Any, list[str]]] = []
        if matrices:
            settings: dict[str, Any] = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
            names = [name for name in named if name in matrices]
            parts.append((torch.optim.Muon(self._groups(names, scales), **settings), names))
        rest = [name for name in named if name not in matrices]
        if rest:
            parts.append(
                (torch.optim.AdamW(self._groups(rest, scales), betas=betas, weight_decay=0.0, fused=True), rest)
            )
        self.parts = [optimizer for optimizer, _ in parts]
        self.owner = {name: optimizer for optimizer, names in parts for name in names}

    def _groups(self, names: list[str], scales: Mapping[str, float]) -> list[dict[str, Any]]:
        return [{"params": [self.named[name]], "scale": scales[name]} for name in names]

    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            optimizer.step()

    def clear(self) -> None:
        """Forgets the gradients."""
        for parameter in self.named.values():
            parameter.grad = None

    def state(self, name: str) -> dict[str, Tensor]:
        """What is kept of a parameter; empty before its first update."""
        kept = self.owner[name].state.get(self.named[name], {})
        return {key: kept[key] for key in STATE if key in kept}

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Puts back what `state` gave."""
        self.owner[name].state[self.named[name]] = state
