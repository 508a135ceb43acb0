"""A preallocated key/value cache, and the causal masks that go with it.

Every step writes a block of rows (padding included) behind those that the cache holds and then drops the rows that do
not count; the next block overwrites them. Attention sees keys up to the next multiple of `kv_multiple`, the surplus
under a mask: its shapes change rarely, and a row's result never depends on what lies behind it.

Shape suffixes: T rows of a block, K padded key/value length, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BlockCache:
    """Keys and values of all decoder layers.

    Args:
        num_layers: decoder layers.
        capacity: rows; rounded up to a multiple of `kv_multiple`.
        kv_multiple: attention sees a key/value length that is a multiple of it.

    Attributes:
        length: rows that count; a step writes behind them, and sets it in the end.
        layers: (keys, values) of each layer, [1, heads, capacity, D], from its first rows on.
    """

    def __init__(self, num_layers: int, capacity: int, kv_multiple: int) -> None:
        self.kv_multiple = kv_multiple
        self.capacity = padded_length(capacity, kv_multiple)
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def write(self, layer: int, start: int, keys_1MTD: Tensor, values_1MTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write T rows of a layer from position `start` on; returns its keys and values up to the padded length K."""
        held = self.layers[layer]
        if held is None:
            held = self.layers[layer] = (self._zeros(keys_1MTD), self._zeros(values_1MTD))
        keys, values = held
        end = start + keys_1MTD.shape[2]
        keys[:, :, start:end] = keys_1MTD
        values[:, :, start:end] = values_1MTD
        padded = padded_length(end, self.kv_multiple)
        return keys[:, :, :padded], values[:, :, :padded]

    def set_length(self, length: int) -> None:
        """Hold the first `length` rows, which must have been written, and nothing else."""
        self.length = length

    def copy_rows(self, other: BlockCache, length: int) -> None:
        """Hold the first `length` rows of another cache, which were written there, and nothing else."""
        for layer, held in enumerate(other.layers):
            if held is not None and other is not self:
                self.write(layer, 0, held[0][:, :, :length], held[1][:, :, :length])
        self.length = length

    def _zeros(self, like: Tensor) -> Tensor:
        # Zeros, not garbage: a masked key weighs 0, but 0 times an uninitialised NaN value would be NaN.
        return like.new_zeros(*like.shape[:2], self.capacity, like.shape[3])


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
