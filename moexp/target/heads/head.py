"""What EAGLE-3 and MTP heads have in common: one decoder layer over pairs of a hidden state and the token behind it.

Pair t holds the target's state at position t and the token at t + 1; a head's output for it says what stands at
t + 2. To draft on, the output takes the place of the target's state in pair t + 1, and so forth: the keys of such
later steps belong to their own chain or branch alone, which is what the explicit masks say. When the target has
verified a block, the cache is rolled back to the pairs with true states and the new ones are run.

Shape suffixes: B rows of a batch, T pairs of a step, K pairs in the cache with them, H width of the head, F width of
what it reads of the target, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn


class Cache(Protocol):
    """Keys and values of the one layer, in the interface that transformers' decoder layers call."""

    length: int

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends T pairs; gives all K."""


@dataclass(frozen=True)
class SharedParts:
    """The target's own modules that a head calls and does not own: no parameters of the head, in no checkpoint of it.

    Attributes:
        embed: token embedding.
        lm_head: output projection, for heads that have none.
        rotary: (like, positions) -> cos, sin. Kept here so that casting the head leaves its frequencies in fp32.
    """

    embed: Callable[[Tensor], Tensor]
    lm_head: Any
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class DraftHead(nn.Module):
    """A head, as drafters and trainers use it.

    Attributes:
        feature_layers: decoder layers of the target whose outputs the head reads, side by side; none: it reads the
            target's final state, after the last norm.
        vocab: V.
        shared: what it uses of the target.
    """

    feature_layers: tuple[int, ...] = ()
    vocab: int
    shared: SharedParts

    def features(self, features_BTF: Tensor) -> Tensor:
        """The target's states as the head's first hidden states [B, T, H]."""
        raise NotImplementedError

    def forward(
        self,
        ids_BT: Tensor,
        hidden_BTH: Tensor,
        positions_BT: Tensor,
        mask_BTK: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """One step: hidden states [B, T, H], to read logits from and to feed back.

        Args:
            ids_BT: target ids of the pairs' tokens.
            hidden_BTH: from `features`, or from the step before.
            positions_BT: position of the pairs' states ([1, T] for all rows alike).
            mask_BTK: bool, which pairs a pair sees ([T, K] and [1, T, K] for all rows alike); by default causal.
            cache: the pairs before; extended.
        """
        before = 0 if cache is None else cache.length
        mask_B1TK = attention_mask(mask_BTK, ids_BT.shape[1], before, hidden_BTH.device)
        embedded_BTH = self.embed(ids_BT).to(next(self.parameters()).dtype)
        return self.step(embedded_BTH, hidden_BTH, positions_BT, mask_B1TK, cache)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of target ids."""
        return self.shared.embed(ids)

    def step(
        self, embedded_BTH: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, mask_B1TK: Tensor, cache: Cache | None
    ) -> Tensor:
        """`forward` of embedded tokens, under a mask for scaled_dot_product_attention."""
        raise NotImplementedError

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        """fp32 logits [B, T, D] over the draft vocabulary."""
        raise NotImplementedError

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary."""
        return draft_ids

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary, -1 for tokens that are not in it."""
        return target_ids

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, by name."""
        return dict(self.named_parameters())


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, times a weight, in the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class HeadCache:
    """A growing cache for drafting, [B, heads, capacity, width]; `rollback` forgets pairs in place."""

    def __init__(self, capacity: int = 512) -> None:
        self.capacity, self.length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + keys.shape[2]
        while self.length > self.capacity:
            self.capacity *= 2
        self._keys = self._write(self._keys, keys, start)
        self._values = self._write(self._values, values, start)
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def rollback(self, length: int) -> None:
        """Forget all pairs from `length` on."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length = length

    def _write(self, store: Tensor | None, new: Tensor, start: int) -> Tensor:
        if store is None or store.shape[2] < self.capacity or store.shape[0] != new.shape[0]:
            # Zeros: a masked key weighs nothing, but nothing times an uninitialised NaN would be NaN.
            grown = new.new_zeros(*new.shape[:2], self.capacity, new.shape[3])
            if store is not None and start:
                grown[:, :, :start] = store[:, :, :start]
            store = grown
        store[:, :, start : self.length] = new
        return store


class TapeCache:
    """A cache that autograd can follow: it concatenates. `fork` gives another that continues from the same pairs."""

    def __init__(self) -> None:
        self.length = 0
        self._both: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._both is not None:
            keys, values = torch.cat([self._both[0], keys], dim=2), torch.cat([self._both[1], values], dim=2)
        self._both, self.length = (keys, values), keys.shape[2]
        return self._both

    def fork(self) -> TapeCache:
        other = TapeCache()
        other._both, other.length = self._both, self.length
        return other


def attention_mask(mask: Tensor | None, rows: int, before: int, device: torch.device) -> Tensor:
    """Bool [B or 1, 1, T, K] for scaled_dot_product_attention; None is causal behind `before` cached pairs."""
    if mask is None:
        mask = torch.ones(rows, before + rows, dtype=torch.bool, device=device).tril(before)
    if mask.dim() == 2:
        mask = mask[None]
    assert mask.dtype == torch.bool and mask.shape[-2:] == (rows, before + rows), (mask.dtype, mask.shape, rows, before)
    return mask[:, None]


def init_matrices(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Matrices keep the scale of what passes through them; norms start at one, biases at zero."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


Head = TypeVar("Head", bound=DraftHead)


def frozen_copy(head: Head) -> Head:
    """A copy of a head that does not train; what it shares with the target stays shared."""
    shared = head.shared
    twin = copy.deepcopy(head, {id(shared): shared})
    return twin.eval().requires_grad_(False)
