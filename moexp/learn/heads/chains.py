"""Head steps as decoding makes them, for all positions of a row at once (EAGLE-3's training-time test).

Step 0 runs every pair (target state t, token t + 1) under a causal mask. From each root t a chain goes on: step s feeds
the head's output of step s - 1 with the next token, and sees the true pairs up to t and its own earlier steps: the
cache of a drafter that has verified up to t. (Published code masks one true pair more at each step.)

Shape suffixes: B rows, L tokens a row, n = L - 1 true pairs, R roots a row, K pairs seen, F, H as in
`moexp.target.heads.head`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moexp.learn.core.experts import hooked, set_training_experts
from moexp.target.heads.head import DraftHead, TapeCache


@dataclass(frozen=True)
class Seen:
    """What the frozen target computed for token rows."""

    features_BLF: Tensor
    """Outputs of the layers that a head reads, side by side; `final_BLH` where it reads none."""
    final_BLH: Tensor
    """States after the last norm."""


class TargetPass:
    """Runs the target (experts in memory; becomes frozen) over rows and gives what a head reads of it."""

    def __init__(self, model: PreTrainedModel, feature_layers: tuple[int, ...]) -> None:
        self.model, self.feature_layers = model, feature_layers
        set_training_experts(model)
        model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, rows_BL: Tensor, cache: DynamicCache | None = None) -> Seen:
        """One pass over token ids; `cache` keeps the keys."""
        outputs: dict[torch.nn.Module, Tensor] = {}

        def keep(layer: torch.nn.Module, _args: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        base: Any = self.model.model
        layers = [base.layers[n] for n in self.feature_layers]
        with hooked(set(layers), keep):
            final_BLH = base(input_ids=rows_BL, cache=cache, use_cache=cache is not None).last_hidden_state
        features = [outputs[layer] for layer in layers]
        return Seen(torch.cat(features, dim=-1) if features else final_BLH, final_BLH)


class Chains:
    """Chains of head steps from roots in all rows.

    `hidden` is the last step's output [B, R, H], `roots` their positions [R], `depth` the steps beyond step 0.
    """

    def __init__(self, head: DraftHead, rows_BL: Tensor, features_BLF: Tensor) -> None:
        self.head = head
        self.pairs = rows_BL.shape[1] - 1
        self.cache, self.depth = TapeCache(), 0
        self.roots = torch.arange(self.pairs, device=rows_BL.device)
        hidden_BnH = head.features(features_BLF[:, :-1])
        self.hidden = head(rows_BL[:, 1:], hidden_BnH, self.roots[None], None, self.cache)

    def fork(self, roots_R: Tensor | None = None) -> Chains:
        """Chains from some of the roots or all; only at step 0."""
        assert self.depth == 0
        other = copy.copy(self)
        other.cache = self.cache.fork()
        if roots_R is not None:
            other.roots, other.hidden = roots_R, self.hidden[:, roots_R]
        return other

    def extend(self, tokens_BR: Tensor) -> Tensor:
        """One further step of every chain; gives the new `hidden`."""
        self.depth += 1
        mask_1RK = chain_mask(self.roots, self.pairs, self.depth)[None]
        self.hidden = self.head(tokens_BR, self.hidden, (self.roots + self.depth)[None], mask_1RK, self.cache)
        return self.hidden


def chain_mask(roots_R: Tensor, pairs: int, depth: int) -> Tensor:
    """Who sees whom at step `depth`, bool [R, pairs + depth R]: pairs up to the root, then the own chain's steps."""
    own_RR = torch.eye(len(roots_R), dtype=torch.bool, device=roots_R.device)
    return torch.cat([pairs_up_to(roots_R, pairs), own_RR.repeat(1, depth)], dim=1)


def pairs_up_to(roots_R: Tensor, pairs: int) -> Tensor:
    """The pairs up to each root, bool [R, pairs]."""
    return torch.arange(pairs, device=roots_R.device)[None] <= roots_R[:, None]


def tokens_at_step(rows_BL: Tensor, step: int) -> Tensor:
    """Token t + 1 + step of each root t [B, n]; for a row's last `step` roots its last token, not to be counted."""
    position_n = torch.arange(1, rows_BL.shape[1], device=rows_BL.device) + step
    return rows_BL[:, position_n.clamp_max(rows_BL.shape[1] - 1)]
