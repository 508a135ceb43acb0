"""Records of a packed checkpoint: each is checked the first time it arrives, and dequantised."""

from __future__ import annotations

import torch

from moexp.runtime.store.dequantize import dequantize_into
from moexp.target.experts import ExpertKey, ExpertWeights
from moexp.target.pack_format import PackedIndex


class RecordReader:
    """Turns records into weights.

    Args:
        index: of the packed checkpoint.
    """

    def __init__(self, index: PackedIndex) -> None:
        self.index = index
        self.record_bytes = index.stored_bytes
        self._checked: set[ExpertKey] = set()

    def check(self, key: ExpertKey, record: memoryview) -> None:
        """Raises MoexpError unless this is that expert's record."""
        if key not in self._checked:
            self.index.check(key, record)
            self._checked.add(key)

    def decode(self, key: ExpertKey, record: memoryview, weights: ExpertWeights) -> None:
        """Fill `weights` from a record."""
        raw = torch.frombuffer(record, dtype=torch.uint8)
        biases, itemsize = weights.tensors[2:], self.index.dtype.itemsize
        end = self.index.locations[key].ranges[0].length - sum(bias.numel() for bias in biases) * itemsize
        dequantize_into(raw[: self.index.down_offset], self.index.quant, weights.gate_up)
        dequantize_into(raw[self.index.down_offset : end], self.index.quant, weights.down)
        for bias in biases:
            begin, end = end, end + bias.numel() * itemsize
            bias.copy_(raw[begin:end].clone().view(self.index.dtype))  # behind blocks it may be unaligned
