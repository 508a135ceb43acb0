"""Experts in host memory: loading all of them, and copying them into slots on demand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moexp.runtime.store.direct_io import DirectFile, open_file, read_into
from moexp.runtime.store.packed import RecordReader
from moexp.runtime.store.slots import Slot, map_huge
from moexp.runtime.store.transfer import Plan, Transfer
from moexp.target.experts import PARTS, ExpertIndex, ExpertKey, ExpertLocation, ExpertWeights
from moexp.target.pack_format import PackedIndex


def load_experts(index: ExpertIndex, dtype: torch.dtype | None = None) -> dict[ExpertKey, ExpertWeights]:
    """Read every expert into one stretch of memory, decoded, and converted to `dtype` where it is given.

    Raises:
        MoexpError: a shard cannot be read.
    """
    dtype = dtype or index.dtype
    total = sum(index.elements(key) for key in index.keys)
    memory, first = map_huge(total * dtype.itemsize)
    elements = torch.frombuffer(memory, dtype=dtype)
    room = Slot(memoryview(memory), elements, first // dtype.itemsize)
    files = [open_file(path, direct=False) for path in index.files]
    records = RecordReader(index) if isinstance(index, PackedIndex) else None
    experts = {}
    used = 0
    try:
        for key in index.keys:
            width, hidden = index.shape(key)
            down, end = used + 2 * width * hidden, used + 3 * width * hidden
            weights = experts[key] = room.weights(used, down, width, hidden, end if index.biased else None)
            used += index.elements(key)
            if index.coding is not None:
                index.coding.decode(_stored(files, index.locations[key]), weights)
                continue
            if records is not None:
                records.decode(key, records.read(files, key), weights)
                continue
            at = index.locations[key]
            targets = (*weights.gate_up.split(at.width), weights.down)
            for target, name in zip(targets, PARTS, strict=True):
                part = at.parts[name]
                span = at.ranges[part.range]
                _read(files[span.file], target, span.start + part.offset, index.dtype)
    finally:
        for file in files:
            os.close(file.fd)
    return experts


def _stored(files: Sequence[DirectFile], at: ExpertLocation) -> dict[str, Tensor]:
    """A coded expert's tensors as they are stored."""
    tensors = {}
    for name, part in at.parts.items():
        span = at.ranges[part.range]
        tensors[name] = torch.empty(part.shape, dtype=part.dtype)
        _read(files[span.file], tensors[name], span.start + part.offset, part.dtype)
    return tensors


class HostSource:
    """Experts in host memory; a transfer is a copy into a slot.

    Args:
        weights: every expert; kept as they are.
    """

    def __init__(self, weights: Mapping[ExpertKey, ExpertWeights]) -> None:
        self._weights = dict(weights)
        self.slot_bytes = max(w.nbytes for w in weights.values())
        self._plans = {key: plan_of(w) for key, w in weights.items()}

    def plan(self, key: ExpertKey) -> Plan:
        return self._plans[key]

    def move(self, transfer: Transfer, piece: None) -> None:
        memory = np.frombuffer(transfer.slot.buffer, dtype=np.uint8)
        weights = self._weights[transfer.key]
        start = 0
        for tensor in weights.tensors:  # numpy copies without the interpreter's lock and in one thread
            np.copyto(memory[start : start + tensor.nbytes], _bytes_of(tensor))
            start += tensor.nbytes

    def finish(self, transfer: Transfer) -> None:
        pass

    def close(self) -> None:
        self._weights.clear()


def plan_of(weights: ExpertWeights) -> Plan:
    """One piece: gate_up, down and biases, one behind the other from the slot's start."""
    hidden, width = weights.down.shape
    down, end = weights.gate_up.numel(), 3 * width * hidden
    bias = None if weights.gate_up_bias is None else end
    return Plan((None,), weights.nbytes, 0, down, width, hidden, bias)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _read(file: DirectFile, target: Tensor, start: int, stored: torch.dtype) -> None:
    same = target.dtype == stored
    landing = target if same else torch.empty(target.shape, dtype=stored)
    read_into(file, memoryview(_bytes_of(landing).data), start, landing.nbytes)
    if not same:
        target.copy_(landing)
