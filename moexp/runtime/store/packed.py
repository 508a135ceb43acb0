"""Experts of a packed checkpoint: records from disk or host memory, checked once, dequantised on arrival."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moexp.runtime.store.dequantize import dequantize_into
from moexp.runtime.store.direct_io import DirectFile, Piece, open_file, open_shards, read_into, read_piece
from moexp.runtime.store.slots import align_up, map_huge
from moexp.runtime.store.transfer import Plan, Transfer
from moexp.target.experts import ExpertKey, ExpertWeights
from moexp.target.pack_format import PackedIndex


class RecordReader:
    """Turns records into weights, each checked against its checksum the first time."""

    def __init__(self, index: PackedIndex) -> None:
        self.index = index
        self._checked: set[ExpertKey] = set()

    def read(self, files: Sequence[DirectFile], key: ExpertKey) -> memoryview:
        """A record, through the page cache.

        Raises:
            MoexpError: it cannot be read.
        """
        span = self.index.locations[key].ranges[0]
        record = memoryview(bytearray(self.index.stored_bytes))
        read_into(files[span.file], record, span.start, len(record))
        return record

    def check(self, key: ExpertKey, record: memoryview) -> None:
        """Raises MoexpError unless this is that expert's record."""
        if key not in self._checked:
            self.index.check(key, record)
            self._checked.add(key)

    def decode(self, key: ExpertKey, record: memoryview, weights: ExpertWeights) -> None:
        """Fill `weights` from a record.

        Raises:
            MoexpError: it is corrupt.
        """
        self.check(key, record)
        at = self.index.locations[key]
        raw = torch.frombuffer(record, dtype=torch.uint8)
        biases = weights.tensors[2:]
        stop = at.ranges[0].length
        end = stop - sum(bias.numel() for bias in biases) * self.index.dtype.itemsize
        split = self.index.down_offset
        self._matrix(raw[:split], weights.gate_up)
        self._matrix(raw[split:end], weights.down)
        for bias in biases:
            begin, end = end, end + bias.numel() * self.index.dtype.itemsize
            bias.copy_(raw[begin:end].clone().view(self.index.dtype))  # behind blocks it may lie at an odd place

    def _matrix(self, raw: Tensor, into: Tensor) -> None:
        if self.index.quant == "none":
            into.copy_(raw.view(self.index.dtype).view(into.shape))
        else:
            dequantize_into(raw, self.index.quant, into)


class _PackedSource:
    """What both sources share: a slot holds the weights, and behind them, where they are quantised, the record."""

    def __init__(self, index: PackedIndex, splits: int) -> None:
        self.index = index
        self._records = RecordReader(index)
        at = index.locations[index.keys[0]]
        self._down = 2 * at.width * at.hidden  # elements: where the down matrix starts
        self._bias = 3 * at.width * at.hidden if index.biased else None
        self._in_place = index.quant == "none"
        self._place = 0 if self._in_place else align_up(index.expert_bytes)
        self.slot_bytes = self._place + index.stored_bytes
        step = align_up(-(-index.stored_bytes // splits))
        self._plans = {key: self._plan(key, step) for key in index.keys}

    def _plan(self, key: ExpertKey, step: int) -> Plan:
        at = self.index.locations[key]
        size, span = self.index.stored_bytes, at.ranges[0]
        pieces = []
        for begin in range(0, size, step):
            length = min(step, size - begin)
            pieces.append(Piece(span.file, span.start + begin, length, self._place + begin, length))
        return Plan(tuple(pieces), size, 0, self._down, at.width, at.hidden, self._bias)

    def plan(self, key: ExpertKey) -> Plan:
        return self._plans[key]

    def finish(self, transfer: Transfer) -> None:
        """Check the record (the first time), and dequantise it into its place."""
        record = transfer.slot.buffer[self._place : self._place + self.index.stored_bytes]
        if self._in_place:
            self._records.check(transfer.key, record)
            return
        plan = transfer.plan
        weights = transfer.slot.weights(plan.gate_up, plan.down, plan.width, plan.hidden, plan.bias)
        self._records.decode(transfer.key, record, weights)


class PackedFileSource(_PackedSource):
    """Experts on disk.

    Args:
        index: of the packed checkpoint.
        splits: pieces that a record is read in.
    """

    def __init__(self, index: PackedIndex, splits: int = 1) -> None:
        super().__init__(index, splits)
        self._files = open_shards(index.files)

    @property
    def direct(self) -> bool:
        """True where no read goes through the page cache."""
        return all(file.direct for file in self._files)

    def move(self, transfer: Transfer, piece: Piece) -> None:
        read_piece(self._files[piece.file], transfer, piece)

    def close(self) -> None:
        for file in self._files:
            os.close(file.fd)
        self._files = ()


class PackedHostSource(_PackedSource):
    """Experts in host memory as they are packed: a transfer copies a record.

    Args:
        index: of the packed checkpoint.

    Raises:
        MoexpError: a file cannot be read.
    """

    def __init__(self, index: PackedIndex) -> None:
        super().__init__(index, 1)
        sizes = [path.stat().st_size for path in index.files]
        memory, begin = map_huge(sum(sizes))
        self._held: list[np.ndarray] = []
        for path, size in zip(index.files, sizes, strict=True):
            view = memoryview(memory)[begin : begin + size]
            file = open_file(path, direct=False)
            try:
                read_into(file, view, 0, size)
            finally:
                os.close(file.fd)
            self._held.append(np.frombuffer(view, dtype=np.uint8))
            begin += size

    def move(self, transfer: Transfer, piece: Piece) -> None:
        into = np.frombuffer(transfer.slot.buffer, dtype=np.uint8)  # numpy copies without the interpreter's lock
        record = self._held[piece.file][piece.start : piece.start + piece.length]
        np.copyto(into[piece.place : piece.place + piece.length], record)

    def close(self) -> None:
        self._held.clear()
