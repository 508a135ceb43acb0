"""Reading experts from safetensors shards past the page cache (O_DIRECT), and measuring how fast that can be."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.runtime.store.slots import PAGE, align_down, align_up
from moexp.runtime.store.transfer import Plan, Transfer
from moexp.target.experts import PARTS, ByteRange, ExpertIndex, ExpertKey, ExpertLocation

_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class Piece(NamedTuple):
    """Whole pages of a shard, from byte `start`, that go to `place` in the slot; the file may end in the last one."""

    file: int
    start: int
    length: int
    place: int
    needed: int  # of `length`: less where the file ends in the last page


@dataclass(frozen=True)
class DirectFile:
    """An open shard; `direct` is False where the file system refused O_DIRECT."""

    path: Path
    fd: int
    direct: bool
    size: int


def open_file(path: Path, *, direct: bool = True) -> DirectFile:
    """Open for reads that bypass the page cache; for buffered reads if not `direct`, or where that is refused.

    Raises:
        MoexpError: the file cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = _open_direct(path, flags) if direct else None
        if fd is not None:
            return DirectFile(path, fd, True, os.fstat(fd).st_size)
        fd = os.open(path, flags)
        return DirectFile(path, fd, False, os.fstat(fd).st_size)
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


def open_shards(paths: Sequence[Path]) -> tuple[DirectFile, ...]:
    """Open shards, warning once where reads will go through the page cache."""
    files = tuple(open_file(path) for path in paths)
    buffered = [file.path for file in files if not file.direct]
    if buffered:
        warnings.warn(
            f"{buffered[0].parent}: O_DIRECT is refused; reads go through the page cache and may be as fast as memory",
            RuntimeWarning,
            stacklevel=2,
        )
    return files


def read_into(file: DirectFile, buffer: memoryview, start: int, needed: int) -> None:
    """Fill `buffer` from `start`; at least `needed` bytes must come. Direct reads want whole pages.

    Raises:
        MoexpError: the file ends too early, or cannot be read.
    """
    done = 0
    while done < needed:
        try:
            got = os.preadv(file.fd, [buffer[done:]], start + done)
        except OSError as error:
            what = f"cannot read shard {file.path.name} at byte {start + done}: {error.strerror}"
            raise MoexpError(what, where=str(file.path)) from error
        short = done + got < needed
        advance = align_down(got) if file.direct and short else got
        if not advance:
            raise MoexpError(f"shard {file.path.name} ends before byte {start + needed}", where=str(file.path))
        done += advance


def read_piece(file: DirectFile, transfer: Transfer, piece: Piece) -> None:
    """Bring a piece into the transfer's slot, leaving nothing in the page cache.

    Raises:
        MoexpError: see `read_into`.
    """
    read_into(file, transfer.slot.buffer[piece.place : piece.place + piece.length], piece.start, piece.needed)
    if not file.direct and hasattr(os, "posix_fadvise"):  # or the next read would come from memory
        os.posix_fadvise(file.fd, piece.start, piece.length, os.POSIX_FADV_DONTNEED)


class FileSource:
    """Experts in place in their shards.

    Coded experts are read behind the room that they take once they are decoded, in the same slot.

    Args:
        index: where they are.
        splits: pieces that each byte range is read in.
        dtype: what coded experts are decoded to.
    """

    def __init__(self, index: ExpertIndex, splits: int = 1, dtype: torch.dtype | None = None) -> None:
        self._files = open_shards(index.files)
        self._itemsize = (dtype or index.dtype).itemsize
        self._coding, self._locations = index.coding, index.locations
        self._bases: dict[ExpertKey, list[int]] = {}  # of coded experts: each range's first byte in the slot
        self._splits = splits
        self._plans: dict[ExpertKey, Plan] = {}
        self._copies: dict[ExpertKey, tuple[tuple[int, int, int], ...]] = {}
        self.slot_bytes = 0
        for key, location in index.locations.items():
            if index.coding is None:
                self._add(key, location)
            else:
                self._add_coded(key, location, index.elements(key))

    @property
    def direct(self) -> bool:
        """True where no read goes through the page cache."""
        return all(file.direct for file in self._files)

    def plan(self, key: ExpertKey) -> Plan:
        return self._plans[key]

    def move(self, transfer: Transfer, piece: Piece) -> None:
        read_piece(self._files[piece.file], transfer, piece)

    def finish(self, transfer: Transfer) -> None:
        """Decode, or bring together what the file keeps apart; most checkpoints need none of it."""
        if self._coding is not None:
            transfer.view()
            self._coding.decode(self._stored(transfer), transfer.weights)
            return
        copies = self._copies.get(transfer.key)
        if copies:
            memory = np.frombuffer(transfer.slot.buffer, dtype=np.uint8)
            for source, target, length in copies:
                memory[target : target + length] = memory[source : source + length]

    def close(self) -> None:
        for file in self._files:
            os.close(file.fd)
        self._files = ()

    def _stored(self, transfer: Transfer) -> dict[str, Tensor]:
        """A coded expert's tensors where they were read to."""
        memory = torch.frombuffer(transfer.slot.buffer, dtype=torch.uint8)
        bases, tensors = self._bases[transfer.key], {}
        for name, part in self._locations[transfer.key].parts.items():
            start = bases[part.range] + part.offset
            stored = memory[start : start + part.nbytes]
            if start % part.dtype.itemsize:
                stored = stored.clone()
            tensors[name] = stored.view(part.dtype).view(part.shape)
        return tensors

    def _pieces(self, ranges: Sequence[ByteRange], room: int) -> tuple[list[Piece], list[int], int]:
        """Reads of ranges to byte `room` of a slot and on: pieces, each range's first byte, and where they end."""
        pieces: list[Piece] = []
        bases = []
        for span in ranges:
            start, stop = align_down(span.start), align_up(span.stop)
            bases.append(room + span.start - start)
            step = align_up(-(-(stop - start) // self._splits))
            for begin in range(start, stop, step):
                length = min(step, stop - begin)
                needed = min(length, span.stop - begin)
                pieces.append(Piece(span.file, begin, length, room + begin - start, needed))
            room += stop - start
        return pieces, bases, room

    def _moved_bytes(self, pieces: Sequence[Piece]) -> int:
        return sum(min(p.start + p.length, self._files[p.file].size) - p.start for p in pieces)

    def _add_coded(self, key: ExpertKey, at: ExpertLocation, elements: int) -> None:
        pieces, self._bases[key], room = self._pieces(at.ranges, align_up(elements * self._itemsize))
        matrix = at.width * at.hidden
        bias = 3 * matrix if elements > 3 * matrix else None
        moved = self._moved_bytes(pieces)
        self._plans[key] = Plan(tuple(pieces), moved, 0, 2 * matrix, at.width, at.hidden, bias)
        self.slot_bytes = max(self.slot_bytes, room)

    def _add(self, key: ExpertKey, at: ExpertLocation) -> None:
        pieces, bases, room = self._pieces(at.ranges, 0)
        matrix_bytes = at.width * at.hidden * self._itemsize
        gate, up, down = (bases[at.parts[part].range] + at.parts[part].offset for part in PARTS)
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
            self._copies[key] = tuple(copies)
        moved = self._moved_bytes(pieces)
        gate, down = gate // self._itemsize, down // self._itemsize
        self._plans[key] = Plan(tuple(pieces), moved, gate, down, at.width, at.hidden)
        self.slot_bytes = max(self.slot_bytes, room)


def probe_bandwidth(
    paths: Sequence[Path], read_bytes: int, *, threads: int = 8, total_bytes: int = 256 << 20, seed: int = 0
) -> float:
    """Bytes a second that `threads` threads get from random aligned reads of about `read_bytes` (whole pages).

    This is the bound of what a store can do at that read size and concurrency. Nothing is cached where O_DIRECT works.

    Raises:
        MoexpError: no file is as long as one read.
    """
    length = max(PAGE, align_down(read_bytes))
    files = [file for file in open_shards(paths) if file.size >= length]
    if not files:
        raise MoexpError(f"no file holds {length} bytes", where=", ".join(map(str, paths)))
    rng = random.Random(seed)
    count = max(threads, total_bytes // length)
    reads = [
        (file, rng.randrange(0, file.size - length + 1, PAGE))
        for file in rng.choices(files, weights=[file.size for file in files], k=count)
    ]
    errors: list[Exception] = []
    barrier = threading.Barrier(threads + 1)

    def work(mine: list[tuple[DirectFile, int]]) -> None:
        buffer = memoryview(mmap.mmap(-1, length))
        try:
            read_into(mine[0][0], buffer, mine[0][1], length)  # touch the buffer's pages, wake the device
            barrier.wait()
            for file, start in mine:
                read_into(file, buffer, start, length)
        except (MoexpError, threading.BrokenBarrierError) as error:
            errors.append(error)
            barrier.abort()

    workers = [threading.Thread(target=work, args=(reads[n::threads],), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    elapsed_s = time.perf_counter() - begin
    for file in files:
        os.close(file.fd)
    if errors:
        raise next((error for error in errors if isinstance(error, MoexpError)), errors[0])
    return count * length / elapsed_s
