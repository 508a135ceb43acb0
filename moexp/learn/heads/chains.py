"""Head steps as decoding makes them, for all positions of a row at once: what EAGLE-3, MTP and GTO train on.

Step 0 runs every pair (target state t, token t + 1) under a causal mask. From each root t a chain goes on: step s feeds
the head's own output of step s - 1 with the next token, at position t + s, and sees the true pairs up to its root t and
the earlier steps of its own chain, nothing else. That is the cache that a drafter has after verifying up to t, so
training meets what decoding meets (EAGLE-3's training-time test).

Published training code masks one true pair more at each step (t at step 1, then t - 1, and so on), which a drafter's
cache does hold; here the mask is the drafter's.

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
    """Outputs of the layers that a head reads, side by side; the final state where it reads none."""
    final_BLH: Tensor
    """States after the last norm."""


class TargetPass:
    """Runs the frozen target over rows and gives what a head reads of it.

    Args:
        model: causal language model with its experts in memory; becomes frozen and gets the experts implementation of
            training.
        feature_layers: see `DraftHead`.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: tuple[int, ...]) -> None:
        self.model, self.feature_layers = model, feature_layers
        set_training_experts(model)
        model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, rows_BL: Tensor, cache: DynamicCache | None = None) -> Seen:
        """One pass over rows of token ids; `cache` keeps the keys for passes behind it."""
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

    `hidden` is the head's output [B, R, H] of the last step, `roots` the positions [R] of the roots (at first all n),
    `depth` the number of steps beyond step 0.
    """

    def __init__(self, head: DraftHead, rows_BL: Tensor, features_BLF: Tensor) -> None:
        self.head = head
        self.pairs = rows_BL.shape[1] - 1
        self.cache, self.depth = TapeCache(), 0
        self.roots = torch.arange(self.pairs, device=rows_BL.device)
        hidden_BnH = head.features(features_BLF[:, :-1])
        self.hidden = head(rows_BL[:, 1:], hidden_BnH, self.roots[None], None, self.cache)

    def fork(self, roots_R: Tensor | None = None) -> Chains:
        """Chains from the same true pairs, with some of the roots or all. Must not have gone beyond step 0."""
        assert self.depth == 0
        other = copy.copy(self)
        other.cache = self.cache.fork()
        if roots_R is not None:
            other.roots, other.hidden = roots_R, self.hidden[:, roots_R]
        return other

    def extend(self, tokens_BR: Tensor) -> Tensor:
        """One further step of every chain, with `tokens_BR` as its tokens; gives the new `hidden`."""
        self.depth += 1
        mask_1RK = chain_mask(self.roots, self.pairs, self.depth)[None]
        self.hidden = self.head(tokens_BR, self.hidden, (self.roots + self.depth)[None], mask_1RK, self.cache)
        return self.hidden


def chain_mask(roots_R: Tensor, pairs: int, depth: int) -> Tensor:
    """Who sees whom at step `depth`, bool [R, pairs + depth R]: true pairs up to the root, then the own chain's steps,
    which were appended step by step, one for each root.
    """
    own_RR = torch.eye(len(roots_R), dtype=torch.bool, device=roots_R.device)
    return torch.cat([pairs_up_to(roots_R, pairs), own_RR.repeat(1, depth)], dim=1)


def pairs_up_to(roots_R: Tensor, pairs: int) -> Tensor:
    """The pairs that are known at each root, bool [R, pairs]."""
    return torch.arange(pairs, device=roots_R.device)[None] <= roots_R[:, None]


def tokens_at_step(rows_BL: Tensor, step: int) -> Tensor:
    """The text's tokens for step `step` of the chains from all n roots: token t + 1 + step of root t; behind the end
    of a row (its last `step` roots) the last token, which is not to be counted.
    """
    position_n = torch.arange(1, rows_BL.shape[1], device=rows_BL.device) + step
    return rows_BL[:, position_n.clamp_max(rows_BL.shape[1] - 1)]
