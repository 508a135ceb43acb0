"""The optimisers of the training loop: AdamW, or Muon for matrices with AdamW for the rest.

Muon (torch's own) replaces a matrix's momentum by the nearest orthogonal matrix, scaled so that an update is as large
as AdamW's: the same learning rates serve both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimizerName = Literal["adamw", "muon"]
STATE = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
"""What an optimiser keeps of a parameter."""
VOCABULARY = ("embed_tokens", "lm_head")


class Optimizers:
    """Updates named parameters; saves and restores what it keeps of each.

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
        matrices = {name for name, parameter in named.items() if kind == "muon" and _is_matrix(name, parameter)}
        muon: Any = partial(torch.optim.Muon, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adamw: Any = partial(torch.optim.AdamW, betas=betas, weight_decay=0.0, fused=True)
        self._owners: dict[str, torch.optim.Optimizer] = {}
        for names, build in ((matrices, muon), (named.keys() - matrices, adamw)):
            groups = [{"params": [named[name]], "scale": scales[name]} for name in named if name in names]
            if groups:
                self._owners |= dict.fromkeys(names, build(groups))

    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for optimizer in set(self._owners.values()):
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            optimizer.step()

    def clear(self) -> None:
        """Forgets the gradients."""
        for parameter in self.named.values():
            parameter.grad = None

    def state(self, name: str) -> dict[str, Tensor]:
        """What is kept of a parameter; empty before its first update."""
        state = self._owners[name].state.get(self.named[name], {})
        return {key: state[key] for key in STATE if key in state}

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Takes over what `state` gave."""
        self._owners[name].state[self.named[name]] = state


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not any(part in name for part in VOCABULARY)
