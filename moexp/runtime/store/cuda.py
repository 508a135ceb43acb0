"""Slots in GPU memory, filled from pinned host memory on a side stream."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from moexp.base.errors import MoexpError
from moexp.runtime.store.host import HostSource
from moexp.runtime.store.slots import ARENA_SLOTS, Slot, Slots
from moexp.runtime.store.transfer import Transfer
from moexp.target.experts import ExpertKey, ExpertWeights


class CudaSlots(Slots):
    """As `Slots`, in the memory of a GPU.

    The compute stream may still be working with a slot when it is given back, so it leaves an event there, which the
    next copy into the slot waits for.
    """

    def __init__(self, slot_bytes: int, dtype: torch.dtype, device: torch.device, *, poison: bool = False) -> None:
        super().__init__(slot_bytes, dtype, poison=poison)
        self.device = device

    def give(self, slot: Slot) -> None:
        if self._poison:
            slot.elements[slot.first : slot.first + self.slot_bytes // self.dtype.itemsize] = float("nan")
        slot.last_use = torch.cuda.current_stream(self.device).record_event()
        self._free.append(slot)

    def _grow(self) -> None:
        step = self.slot_bytes // self.dtype.itemsize
        arena = torch.empty(ARENA_SLOTS * step, dtype=self.dtype, device=self.device)
        self._free = [Slot(memoryview(b""), arena, number * step) for number in reversed(range(ARENA_SLOTS))]
        self.allocated += ARENA_SLOTS


class PinnedSource(HostSource):
    """Experts in pinned host memory, copied to a GPU by the worker's own stream.

    Args:
        weights: every expert, in few large stretches of host memory (`load_experts` makes one); these are pinned where
            they are, without the rounding of an allocator for pinned memory.
        device: the GPU.

    Raises:
        MoexpError: the memory cannot be pinned.
    """

    def __init__(self, weights: Mapping[ExpertKey, ExpertWeights], device: torch.device) -> None:
        super().__init__(weights)
        self._device = device
        self._local = threading.local()
        storages = [tensor.untyped_storage() for w in weights.values() for tensor in w.tensors]
        self._pinned: list[int] = []
        for address, size in {storage.data_ptr(): storage.nbytes() for storage in storages}.items():
            status = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
            if status != 0:
                raise MoexpError(f"cannot pin {size} bytes of host memory (CUDA error {status})")
            self._pinned.append(address)

    def move(self, transfer: Transfer, piece: None) -> None:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        stream, slot, source = self._local.stream, transfer.slot, self._weights[transfer.key]
        transfer.view()
        with torch.cuda.stream(stream):
            if slot.last_use is not None:
                stream.wait_event(slot.last_use)
            for target, tensor in zip(transfer.weights.tensors, source.tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
        stream.synchronize()  # in the worker: an expert that has landed needs no further ordering

    def close(self) -> None:
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        super().close()
