"""Experts in host memory: loading all of them, and copying them into slots on demand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from moexp.runtime.store.disk import FileSource, decodes, open_file
from moexp.runtime.store.slots import Slot, Slots, map_huge
from moexp.runtime.store.transfer import Plan, Transfer
from moexp.target.experts import ExpertIndex, ExpertKey, ExpertWeights


def load_experts(index: ExpertIndex, dtype: torch.dtype | None = None) -> dict[ExpertKey, ExpertWeights]:
    """Read every expert into one stretch of memory, decoded, and converted to `dtype` where it is given.

    Raises:
        MoexpError: a shard cannot be read.
    """
    dtype = dtype or index.dtype
    arriving = dtype if decodes(index) else index.dtype
    memory, first = map_huge(sum(index.elements(key) for key in index.keys) * dtype.itemsize)
    room = Slot(memoryview(memory), torch.frombuffer(memory, dtype=dtype), first // dtype.itemsize)
    source = FileSource(index, [open_file(path, cached=True) for path in index.files], dtype=arriving)
    slot, used, experts = Slots(source.slot_bytes, arriving).take(), 0, {}
    try:
        for key in index.keys:
            transfer = Transfer(key, source.plan(key), slot)
            for piece in transfer.plan.pieces:
                source.move(transfer, piece)
            source.finish(transfer)
            transfer.view()
            width, hidden = index.shape(key)
            down, end = used + 2 * width * hidden, used + 3 * width * hidden
            experts[key] = room.weights(width, hidden, used, down, end if index.biased else None)
            for target, tensor in zip(experts[key].tensors, transfer.weights.tensors, strict=True):
                target.copy_(tensor)
            used += index.elements(key)
    finally:
        source.close()
    return experts


class HostSource:
    """Experts in host memory; a transfer is a copy into a slot.

    Args:
        weights: every expert.
    """

    def __init__(self, weights: Mapping[ExpertKey, ExpertWeights]) -> None:
        self._weights = dict(weights)
        self.slot_bytes = max(w.nbytes for w in weights.values())
        self._plans = {key: _plan_of(w) for key, w in weights.items()}

    def plan(self, key: ExpertKey) -> Plan:
        return self._plans[key]

    def move(self, transfer: Transfer, piece: None) -> None:
        memory = np.frombuffer(transfer.slot.buffer, dtype=np.uint8)
        start = 0
        for tensor in self._weights[transfer.key].tensors:  # numpy copies without the interpreter's lock, in one thread
            np.copyto(memory[start : start + tensor.nbytes], _bytes_of(tensor))
            start += tensor.nbytes

    def finish(self, transfer: Transfer) -> None:
        pass

    def close(self) -> None:
        self._weights.clear()


def _plan_of(weights: ExpertWeights) -> Plan:
    """One piece: gate_up, down and biases, one behind the other from the slot's start."""
    hidden, width = weights.down.shape
    end = 3 * width * hidden
    bias = None if weights.gate_up_bias is None else end
    return Plan((None,), weights.nbytes, width, hidden, 0, 2 * width * hidden, bias)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
