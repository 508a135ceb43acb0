"""How fast a disk can be read at a store's read size and concurrency."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.runtime.store.disk import DiskFile, open_shards
from moexp.runtime.store.slots import PAGE, align_down


def probe_bandwidth(
    paths: Sequence[Path], read_bytes: int, *, threads: int = 8, total_bytes: int = 256 << 20, seed: int = 0
) -> float:
    """Bytes a second that `threads` threads get from random aligned reads of about `read_bytes` (whole pages).

    This is the bound of what a store can do at that read size and concurrency. Nothing is cached where O_DIRECT works.

    Raises:
        MoexpError: no file is as long as one read.
    """
    length = max(PAGE, align_down(read_bytes))
    opened = open_shards(paths)
    try:
        files = [file for file in opened if file.size >= length]
        if not files:
            raise MoexpError(f"no file holds {length} bytes", where=", ".join(map(str, paths)))
        rng = random.Random(seed)
        count = max(threads, total_bytes // length)
        reads = [
            (file, rng.randrange(0, file.size - length + 1, PAGE))
            for file in rng.choices(files, weights=[file.size for file in files], k=count)
        ]
        buffers = [memoryview(mmap.mmap(-1, length)) for _ in range(threads)]

        def work(buffer: memoryview, own: Sequence[tuple[DiskFile, int]]) -> None:
            for file, start in own:
                file.read(buffer, start, length)

        with ThreadPoolExecutor(threads) as pool:
            # Once before: touches the buffers' pages, starts the threads, wakes the device.
            list(pool.map(work, buffers, [reads[n : n + 1] for n in range(threads)]))
            begin_s = time.perf_counter()
            list(pool.map(work, buffers, [reads[n::threads] for n in range(threads)]))
            return count * length / (time.perf_counter() - begin_s)
    finally:
        for file in opened:
            file.close()
