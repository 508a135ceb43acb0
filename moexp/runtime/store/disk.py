"""Experts in files: read past the page cache (O_DIRECT) in whole pages (`DiskFile.read`), and brought into their final
form in a slot (`FileSource`).
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.runtime.store.packed import RecordReader
from moexp.runtime.store.slots import PAGE, align_down, align_up, map_huge
from moexp.runtime.store.transfer import Plan, Transfer
from moexp.target.experts import PARTS, ByteRange, ExpertIndex, ExpertKey, ExpertLocation
from moexp.target.pack_format import PackedIndex

_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class DiskFile:
    """An open shard.

    Attributes:
        direct: whether reads bypass the page cache.
        cached: whether the page cache may keep what is read, where they do not.
    """

    path: Path
    fd: int
    size: int
    direct: bool
    cached: bool

    def read(self, buffer: memoryview, start: int, needed: int) -> None:
        """Fill `buffer` from byte `start`; at least `needed` bytes must come. Direct reads want whole pages.

        Raises:
            MoexpError: the file ends too early, or cannot be read.
        """
        done = 0
        while done < needed:
            try:
                got = os.preadv(self.fd, [buffer[done:]], start + done)
            except OSError as error:
                what = f"cannot read shard {self.path.name} at byte {start + done}: {error.strerror}"
                raise MoexpError(what, where=str(self.path)) from error
            short = done + got < needed
            advance = align_down(got) if self.direct and short else got
            if not advance:
                raise MoexpError(f"shard {self.path.name} ends before byte {start + needed}", where=str(self.path))
            done += advance
        if not self.direct and not self.cached and hasattr(os, "posix_fadvise"):  # or the next read is from memory
            os.posix_fadvise(self.fd, start, len(buffer), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.fd)


class HeldFile:
    """A file's bytes in host memory, read as a `DiskFile` is."""

    def __init__(self, path: Path, memory: memoryview) -> None:
        self.size, self.direct = len(memory), False
        file = open_file(path, cached=True)
        try:
            file.read(memory, 0, self.size)
        finally:
            file.close()
        self._bytes = np.frombuffer(memory, dtype=np.uint8)

    def read(self, buffer: memoryview, start: int, needed: int) -> None:
        """Fill `buffer` from byte `start`."""
        target = np.frombuffer(buffer, dtype=np.uint8)  # numpy copies without the interpreter's lock
        np.copyto(target[:needed], self._bytes[start : start + needed])

    def close(self) -> None:
        self._bytes = self._bytes[:0]


def open_file(path: Path, *, cached: bool = False) -> DiskFile:
    """Open for reads that bypass the page cache, where that is not refused; with `cached`, for reads through it.

    Raises:
        MoexpError: the file cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = None if cached else _open_direct(path, flags)
        direct = fd is not None
        if fd is None:
            fd = os.open(path, flags)
        return DiskFile(path, fd, os.fstat(fd).st_size, direct, cached)
    except OSError as error:
        raise MoexpError(f"cannot open shard {path.name}: {error.strerror}", where=str(path)) from error


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor, or None where the file system refuses; some refuse only the first read."""
    if not hasattr(os, "O_DIRECT"):
        return None
    fd = None
    try:
        fd = os.open(path, flags | os.O_DIRECT)
        os.preadv(fd, [mmap.mmap(-1, PAGE)], 0)
        return fd
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if error.errno in _REFUSED:
            return None
        raise


def open_shards(paths: Sequence[Path]) -> list[DiskFile]:
    """Open shards, warning once where reads will go through the page cache."""
    files = [open_file(path) for path in paths]
    buffered = [file.path for file in files if not file.direct]
    if buffered:
        warnings.warn(
            f"{buffered[0].parent}: O_DIRECT is refused; reads go through the page cache and may be as fast as memory",
            RuntimeWarning,
            stacklevel=2,
        )
    return files


def hold_shards(paths: Sequence[Path]) -> list[HeldFile]:
    """Read files into one stretch of host memory."""
    sizes = [path.stat().st_size for path in paths]
    memory, begin = map_huge(sum(sizes))
    files = []
    for path, size in zip(paths, sizes, strict=True):
        files.append(HeldFile(path, memoryview(memory)[begin : begin + size]))
        begin += size
    return files


class Piece(NamedTuple):
    """Whole pages of a file, from byte `start`, that go to byte `offset` of the slot."""

    file: int
    start: int
    length: int
    offset: int
    needed: int  # of `length`: less where the file ends in the last page


class FileSource:
    """Experts in place in their files. Those that are decoded are read behind the room of their weights, in one slot.

    Args:
        index: where they are.
        files: the index's, open; closed with the source.
        splits: pieces that each byte range is read in.
        dtype: what coded and quantised experts are decoded to.
    """

    def __init__(
        self,
        index: ExpertIndex,
        files: Sequence[DiskFile | HeldFile],
        splits: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._index, self._files, self._splits = index, files, splits
        self._itemsize = (dtype or index.dtype).itemsize
        self._records = RecordReader(index) if isinstance(index, PackedIndex) else None
        self._decodes = decodes(index)
        self._bases: dict[ExpertKey, list[int]] = {}  # each range's first byte in the slot
        self._plans: dict[ExpertKey, Plan] = {}
        self._copies: dict[ExpertKey, list[tuple[int, int, int]]] = {}
        self.slot_bytes = 0
        for key, location in index.locations.items():
            if self._decodes or self._records is not None:
                self._add_stored(key, location)
            else:
                self._add_plain(key, location)

    @property
    def direct(self) -> bool:
        """True where no read goes through the page cache."""
        return all(file.direct for file in self._files)

    def plan(self, key: ExpertKey) -> Plan:
        return self._plans[key]

    def move(self, transfer: Transfer, piece: Piece) -> None:
        buffer = transfer.slot.buffer[piece.offset : piece.offset + piece.length]
        self._files[piece.file].read(buffer, piece.start, piece.needed)

    def finish(self, transfer: Transfer) -> None:
        """Check and decode, or bring together what the file keeps apart; most checkpoints need none of it."""
        key, memory = transfer.key, transfer.slot.buffer
        if self._records is not None:
            start = self._bases[key][0]
            record = memory[start : start + self._records.record_bytes]
            self._records.check(key, record)
            if self._decodes:
                transfer.view()
                self._records.decode(key, record, transfer.weights)
        elif self._index.coding is not None:
            transfer.view()
            self._index.coding.decode(self._stored(transfer), transfer.weights)
        elif key in self._copies:
            array = np.frombuffer(memory, dtype=np.uint8)
            for source, target, length in self._copies[key]:
                array[target : target + length] = array[source : source + length]

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = ()

    def _stored(self, transfer: Transfer) -> dict[str, Tensor]:
        """A coded expert's tensors as they were read."""
        memory = torch.frombuffer(transfer.slot.buffer, dtype=torch.uint8)
        bases, tensors = self._bases[transfer.key], {}
        for name, part in self._index.locations[transfer.key].parts.items():
            start = bases[part.range] + part.offset
            stored = memory[start : start + part.nbytes]
            if start % part.dtype.itemsize:
                stored = stored.clone()
            tensors[name] = stored.view(part.dtype).view(part.shape)
        return tensors

    def _pieces(self, key: ExpertKey, ranges: Sequence[ByteRange], room: int) -> tuple[list[Piece], int]:
        """Reads of ranges to byte `room` of a slot and on, and where they end."""
        pieces: list[Piece] = []
        bases = self._bases[key] = []
        for span in ranges:
            start, stop = align_down(span.start), align_up(span.stop)
            bases.append(room + span.start - start)
            step = align_up(-(-(stop - start) // self._splits))
            for begin in range(start, stop, step):
                length = min(step, stop - begin)
                needed = min(length, self._files[span.file].size - begin)
                pieces.append(Piece(span.file, begin, length, room + begin - start, needed))
            room += stop - start
        return pieces, room

    def _add_stored(self, key: ExpertKey, location: ExpertLocation) -> None:
        elements, matrix = self._index.elements(key), location.width * location.hidden
        room = align_up(elements * self._itemsize) if self._decodes else 0
        pieces, end = self._pieces(key, location.ranges, room)
        self._add(key, location, pieces, end, (0, 2 * matrix, 3 * matrix if elements > 3 * matrix else None))

    def _add_plain(self, key: ExpertKey, location: ExpertLocation) -> None:
        pieces, room = self._pieces(key, location.ranges, 0)
        matrix_bytes, bases = location.width * location.hidden * self._itemsize, self._bases[key]
        gate, up, down = (bases[location.parts[part].range] + location.parts[part].offset for part in PARTS)
        copies = []
        if up != gate + matrix_bytes or gate % self._itemsize:
            copies += [(gate, room, matrix_bytes), (up, room + matrix_bytes, matrix_bytes)]
            gate = room
            room = align_up(room + 2 * matrix_bytes)
        if down % self._itemsize:
            copies.append((down, room, matrix_bytes))
            down = room
            room = align_up(room + matrix_bytes)
        if copies:
            self._copies[key] = copies
        self._add(key, location, pieces, room, (gate // self._itemsize, down // self._itemsize, None))

    def _add(
        self,
        key: ExpertKey,
        location: ExpertLocation,
        pieces: list[Piece],
        end: int,
        starts: tuple[int, int, int | None],
    ) -> None:
        moved = sum(piece.needed for piece in pieces)
        self._plans[key] = Plan(tuple(pieces), moved, location.width, location.hidden, *starts)
        self.slot_bytes = max(self.slot_bytes, end)


def decodes(index: ExpertIndex) -> bool:
    """Whether experts are stored otherwise than they are served."""
    return index.coding is not None or (isinstance(index, PackedIndex) and index.quant != "none")
