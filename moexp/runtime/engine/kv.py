"""A preallocated key/value cache in transformers' cache interface, and the causal masks that go with it.

Every step writes a whole block of rows (padding included) behind what is already there and is then cropped to the
rows that count; the next block overwrites the rest. Attention sees keys up to the next multiple of `kv_multiple`, the
surplus under a mask: its shapes change rarely, and a row's result never depends on what lies behind it.

Shape suffixes: T rows of a block, K padded key/value length, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class BlockCacheLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [1, heads, capacity, D]."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int, kv_multiple: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.kv_multiple = kv_multiple
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def empty(like: Tensor) -> Tensor:
            return like.new_zeros(*like.shape[:2], self.capacity, like.shape[3])

        # Zeros, not garbage: a masked key weighs 0, but 0 times an uninitialised NaN value would be NaN.
        self.keys, self.values = empty(key_states), empty(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write T rows behind those there are; returns keys and values up to the padded length K."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        padded = padded_length(self.length, self.kv_multiple)
        return self.keys[:, :, :padded], self.values[:, :, :padded]

    def copy_rows(self, other: BlockCacheLayer, length: int) -> None:
        """Hold the first `length` rows of another layer, and nothing else."""
        assert other.keys is not None and other.values is not None
        if not self.is_initialized:
            self.lazy_initialization(other.keys, other.values)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, :length] = other.keys[:, :, :length]
        self.values[:, :, :length] = other.values[:, :, :length]
        self.length = length

    def crop(self, tokens_to_remove: int) -> None:
        assert 0 <= -tokens_to_remove <= self.length
        self.length += tokens_to_remove

    def reset(self) -> None:
        self.length = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return padded_length(self.length + query_length, self.kv_multiple), 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class BlockCache(Cache):
    """One `BlockCacheLayer` a decoder layer.

    Args:
        num_layers: decoder layers.
        capacity: rows; rounded up to a multiple of `kv_multiple`.
        kv_multiple: attention sees a key/value length that is a multiple of it.
    """

    def __init__(self, num_layers: int, capacity: int, kv_multiple: int) -> None:
        self.kv_multiple = kv_multiple
        self.capacity = padded_length(capacity, kv_multiple)
        self._layers = [BlockCacheLayer(self.capacity, kv_multiple) for _ in range(num_layers)]
        super().__init__(layers=list(self._layers))

    @property
    def length(self) -> int:
        """Rows held."""
        return self._layers[0].length

    def copy_rows(self, other: BlockCache, length: int) -> None:
        """Hold the first `length` rows of another cache, which has them, and nothing else."""
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.copy_rows(theirs, length)

    def rewind(self, layer: int, length: int) -> None:
        """Keep only the first `length` rows of one layer, while a step is on its way through the layers."""
        self._layers[layer].length = length

    def rows_of(self, layer: int) -> int:
        """Rows held in one layer."""
        return self._layers[layer].length


class CausalMasks:
    """Additive masks [T, K] for a block of T rows that starts at any position: views of one band, nothing is computed.

    Row i of a block that starts at position s sees keys 0 .. s + i; with a window, the last `window` of them.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device, window: int | None = None) -> None:
        self.window = window
        self.capacity = capacity
        self.dtype = dtype
        self.device = device
        self._bands: dict[tuple[int, int], Tensor] = {}

    def block(self, rows: int, start: int, padded: int, repeat: int = 1) -> Tensor:
        """Mask [rows, padded] of the block at `start`, repeated `repeat` times along its rows."""
        band = self._bands.get((rows, repeat))
        if band is None:
            column = torch.arange(2 * self.capacity, device=self.device)
            row = torch.arange(rows, device=self.device)[:, None]
            band = torch.zeros(rows, 2 * self.capacity, dtype=self.dtype, device=self.device)
            band.masked_fill_(column > row + self.capacity, float("-inf"))
            if self.window is not None:
                band.masked_fill_(column <= row + self.capacity - self.window, float("-inf"))
            band = self._bands[rows, repeat] = band.repeat(repeat, 1)
        first = self.capacity - start
        return band[:, first : first + padded]


def padded_length(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple
