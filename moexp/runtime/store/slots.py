"""Reusable page-aligned memory for experts in flight and in use."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moexp.target.experts import ExpertWeights

PAGE = 4096
_HUGE_PAGE = 2 << 20
_VIEWS = 64  # cached a slot: an expert's offset in its page depends on its layer, often on nothing else
ARENA_SLOTS = 64
_ARENA_BYTES = 256 << 20


def align_down(offset: int) -> int:
    return offset & -PAGE


def align_up(offset: int) -> int:
    return -(-offset & -PAGE)


class Slot:
    """Room for one expert: `buffer` to read into, `elements` (its arena, in the experts' type) to view it.

    `last_use`: in GPU memory, the event after which the slot may be overwritten.
    """

    __slots__ = ("_views", "buffer", "elements", "first", "last_use")

    def __init__(self, buffer: memoryview, elements: Tensor, first: int) -> None:
        self.buffer = buffer
        self.elements = elements
        self.first = first  # this slot's first element in `elements`
        self.last_use: Any = None
        self._views: dict[tuple[int, int, int, int, int | None], ExpertWeights] = {}

    def weights(self, width: int, hidden: int, gate_up: int, down: int, bias: int | None = None) -> ExpertWeights:
        """Views of an expert whose matrices start `gate_up` and `down` elements into the slot, its biases at `bias`."""
        where = (width, hidden, gate_up, down, bias)
        views = self._views.get(where)  # making two tensors takes longer than all else that an arrival costs
        if views is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            views = self._views[where] = ExpertWeights(
                torch.as_strided(self.elements, (2 * width, hidden), (hidden, 1), self.first + gate_up),
                torch.as_strided(self.elements, (hidden, width), (width, 1), self.first + down),
                *(self._vectors(bias, 2 * width, hidden) if bias is not None else ()),
            )
        return views

    def _vectors(self, start: int, *lengths: int) -> list[Tensor]:
        first = self.first + start
        return list(self.elements[first : first + sum(lengths)].split(lengths))


class Slots:
    """Slots cut from large arenas, which are added as they are needed and stay until the store goes.

    The slot freed last is given out first: its memory is most likely still in a cache, and the set of pages in use
    stays small.

    Args:
        slot_bytes: room of a slot; rounded up to whole pages.
        dtype: the experts' type.
        poison: fill freed slots with NaN, so that a use after release shows (for tests).
    """

    def __init__(self, slot_bytes: int, dtype: torch.dtype, *, poison: bool = False) -> None:
        self.slot_bytes = align_up(slot_bytes)
        self.dtype = dtype
        self.allocated = 0
        self._poison = poison
        self._free: list[Slot] = []

    def take(self) -> Slot:
        if not self._free:
            self._grow()
        return self._free.pop()

    def give(self, slot: Slot) -> None:
        if self._poison:
            np.frombuffer(slot.buffer, dtype=np.uint8).fill(0xFF)
        self._free.append(slot)

    def clear(self) -> None:
        """Forget all free slots; their memory goes with the last reference to it."""
        self._free.clear()

    def _grow(self) -> None:
        count = max(1, min(ARENA_SLOTS, _ARENA_BYTES // self.slot_bytes))
        memory, first = map_huge(count * self.slot_bytes)
        elements = torch.frombuffer(memory, dtype=self.dtype)
        view = memoryview(memory)
        for number in reversed(range(count)):  # the lowest is used first
            start = first + number * self.slot_bytes
            slot = Slot(view[start : start + self.slot_bytes], elements, start // self.dtype.itemsize)
            self._free.append(slot)
        self.allocated += count


def map_huge(size_bytes: int) -> tuple[mmap.mmap, int]:
    """Anonymous memory, in huge pages where the system has them: (mapping, offset of the first usable byte)."""
    # private: Python maps shared memory by default, which never gets huge pages
    memory = mmap.mmap(-1, size_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
