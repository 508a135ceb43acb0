"""Settings of the process that every command which computes makes once: threads, and an allocator that keeps its
memory.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from typing import Literal

from moexp.errors import MoexpError

Device = Literal["auto", "cpu", "cuda"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
KEEP_BYTES = 1 << 30


def prepare(threads: int = 0) -> int:
    """Sets torch's threads (0: one a core) and stops glibc from returning large blocks to the system; returns the
    threads.

    A training step on a CPU allocates the same few hundred megabytes again and again; handing them back each time
    costs a page fault per 4 KB, which measured as half of a distillation step.
    """
    import torch

    if sys.platform == "linux":
        name = ctypes.util.find_library("c")
        libc = ctypes.CDLL(name) if name else None
        if libc is not None and hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, KEEP_BYTES)
            libc.mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)  # an int: at most 2 GiB
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
    count = threads or os.cpu_count() or 1
    torch.set_num_threads(count)
    return count


def pick_device(wanted: Device, store: str) -> str:
    """Where a target is to be decoded: "cpu" or "cuda".

    Args:
        wanted: the recipe's `device`; "auto" is the GPU where there is one and the store can serve it.
        store: the kind of the recipe's store. Experts on disk are served in host memory.

    Raises:
        MoexpError: a GPU that is not there is asked for, or one that the store cannot serve.
    """
    if wanted == "cpu" or (wanted == "auto" and store == "disk"):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        if store == "disk":
            raise MoexpError(
                "experts on disk are served on the CPU", where="device", valid="store.kind host or resident"
            )
        return "cuda"
    if wanted == "cuda":
        raise MoexpError("no CUDA device, or a torch built without CUDA", where="device", valid="cpu, auto")
    return "cpu"
