"""What a process computes on: threads, an allocator that keeps its memory, and the device."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from typing import TYPE_CHECKING, Literal

from moexp.base import ranks
from moexp.base.errors import MoexpError

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
KEEP_BYTES = 1 << 30
NO_CUDA = "no CUDA device, or a torch built without CUDA"


def prepare(threads: int = 0) -> int:
    """Sets torch's threads (0: one a core, dealt to the processes of a run) and stops glibc from returning large
    blocks to the system; returns the threads.

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
    count = threads or max(1, (os.cpu_count() or 1) // ranks.local_world())
    torch.set_num_threads(count)
    return count


def pick_device(wanted: Device, store: str) -> str:
    """Where a target is to be decoded: "cpu" or "cuda".

    Args:
        wanted: the recipe's `device`; "auto" is the GPU where there is one and the store can serve it.
        store: the kind of the recipe's store. Experts on disk are served in host memory.

    Raises:
        MoexpError: a GPU is demanded that does not exist, or one that the store cannot serve.
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
        raise MoexpError(NO_CUDA, where="device", valid="cpu, auto")
    return "cpu"


def training_device(wanted: Device) -> torch.device:
    """Where a target with all its experts is trained on, traced and measured: the CPU, or this process's own GPU.

    Args:
        wanted: the recipe's `device`; "auto" is a GPU where there is one for every process of the machine.

    Raises:
        MoexpError: a GPU is demanded and there is none, or fewer than processes.
    """
    import torch

    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if count > ranks.local_rank() and count >= ranks.local_world():
        device = torch.device("cuda", ranks.local_rank())
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        if not count:
            raise MoexpError(NO_CUDA, where="device", valid="cpu, auto")
        what = f"{count} GPUs for {ranks.local_world()} processes"
        raise MoexpError(what, where="device", valid=f"--nproc-per-node up to {count}, device=cpu")
    return torch.device("cpu")
