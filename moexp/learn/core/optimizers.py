"""The optimisers of the training loop: AdamW, or Muon for matrices with AdamW for the rest.

Muon's updates are scaled to the size of AdamW's: the same learning rates serve both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

OptimizerName = Literal["adamw", "muon"]
STATE = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
"""What an optimiser keeps of a parameter."""
VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Updates:
    """How gradients change parameters."""

    optimizer: OptimizerName = "adamw"
    """Muon leaves `VOCABULARY` to AdamW: it would make all tokens learn alike, however rare."""
    clip: float = 1.0  # largest norm of the gradient
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    """Factor of the learning rate by start of a parameter's name."""

    def optimizers(self, named: Mapping[str, nn.Parameter]) -> dict[str, Optimizer]:
        """The optimiser of each parameter; a few serve all."""
        matrices = {
            name
            for name, parameter in named.items()
            if self.optimizer == "muon" and parameter.ndim == 2 and not any(part in name for part in VOCABULARY)
        }
        muon: Any = partial(torch.optim.Muon, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adamw: Any = partial(torch.optim.AdamW, betas=self.betas, weight_decay=0.0, fused=True)
        optimizers: dict[str, Optimizer] = {}
        for names, build in ((matrices, muon), (named.keys() - matrices, adamw)):
            groups = [{"params": [named[name]], "scale": self._scale(name)} for name in named if name in names]
            if groups:
                optimizers |= dict.fromkeys(names, build(groups))
        return optimizers

    def _scale(self, name: str) -> float:
        return next((scale for key, scale in self.lr_scale.items() if name.startswith(key)), 1.0)


ADAMW = Updates()


def update(optimizers: Mapping[str, Optimizer], rate: float) -> None:
    """One update of all parameters at this learning rate."""
    for optimizer in set(optimizers.values()):
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        optimizer.step()
