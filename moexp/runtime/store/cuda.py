"""Slots in GPU memory, filled from pinned host memory on a side stream."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from moexp.base.errors import MoexpError
from moexp.runtime.store.host import plan_of
from moexp.runtime.store.slots import Slot
from moexp.runtime.store.transfer import Plan, Transfer
from moexp.target.experts import ExpertKey, ExpertWeights

_ARENA_SLOTS = 64


class CudaSlots:
    """As `Slots`, in the memory of a GPU.

    The compute stream may still be working with a slot when it is given back, so it leaves an event there, which the
    next copy into the slot waits for.
    """

    def __init__(self, slot_bytes: int, dtype: torch.dtype, device: torch.device, *, poison: bool = False) -> None:
        self.slot_bytes = -(-slot_bytes // 256) * 256  # matrices start where kernels want them
        self.dtype, self.device = dtype, device
        self.allocated = 0
        self._poison = poison
        self._free: list[Slot] = []

    def take(self) -> Slot:
        if not self._free:
            step = self.slot_bytes // self.dtype.itemsize
            arena = torch.empty(_ARENA_SLOTS * step, dtype=self.dtype, device=self.device)
            self._free = [Slot(memoryview(b""), arena, number * step) for number in reversed(range(_ARENA_SLOTS))]
            self.allocated += _ARENA_SLOTS
        return self._free.pop()

    def give(self, slot: Slot) -> None:
        if self._poison:
            slot.elements[slot.first : slot.first + self.slot_bytes // self.dtype.itemsize] = float("nan")
        slot.last_use = torch.cuda.current_stream(self.device).record_event()
        self._free.append(slot)

    def clear(self) -> None:
        self._free.clear()


class PinnedSource:
    """Experts in pinned host memory, copied to a GPU by the worker's own stream.

    Args:
        weights: every expert, in few large stretches of host memory (`load_experts` makes one); these are pinned where
            they are, without the rounding of an allocator for pinned memory.
        device: the GPU.

    Raises:
        MoexpError: the memory cannot be pinned.
    """

    def __init__(self, weights: Mapping[ExpertKey, ExpertWeights], device: torch.device) -> None:
        self._weights = dict(weights)
        self._device = device
        self._local = threading.local()
        self.slot_bytes = max(w.nbytes for w in weights.values())
        storages = {}
        for w in weights.values():
            for tensor in w.tensors:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
        self._pinned: list[int] = []
        for address, storage in storages.items():
            status = torch.cuda.cudart().cudaHostRegister(address, storage.nbytes(), 0)
            if int(status) != 0:
                raise MoexpError(f"cannot pin {storage.nbytes()} bytes of host memory (CUDA error {int(status)})")
            self._pinned.append(address)

    def plan(self, key: ExpertKey) -> Plan:
        return plan_of(self._weights[key])

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

    def finish(self, transfer: Transfer) -> None:
        pass

    def close(self) -> None:
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        self._weights.clear()
