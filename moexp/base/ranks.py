"""Data parallelism under `torchrun`: which process this is, and the few things that the processes do together.

    torchrun --nproc-per-node 2 -m moexp train-draft-expert --recipe pocket

Every rank has a replica of the frozen target and takes its share of each batch's rows. Rank 0 alone writes files that
others read, shows progress and prints. In a single process every function here gives back what it was given, so that
callers need not ask. No other module knows torch.distributed. gloo carries what is in host memory, NCCL what is in
that of GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from moexp.base.errors import MoexpError

if TYPE_CHECKING:  # commands that train nothing start without torch
    from torch import Tensor

T = TypeVar("T")

_alone: ContextVar[bool] = ContextVar("moexp_alone", default=False)  # inside `on_main`

PATIENCE = timedelta(days=2)
"""How long a rank waits for the others: rank 0 may measure for hours. One that ended is noticed at once."""
BUCKET_BYTES = 64 << 20  # gradients that are exchanged at once; each rank holds as much of every other


class PeerLost(Exception):
    """Another process of this run has ended, or cannot be reached."""


def launched() -> int:
    """How many processes the launcher says there are; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process on its machine: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if world() > 1 else 0


def local_world() -> int:
    """How many of the processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world() > 1 else 1


def world() -> int:
    """How many processes work together."""
    if _alone.get():
        return 1
    dist = sys.modules.get("torch.distributed")
    return int(dist.get_world_size()) if dist is not None and dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return int(sys.modules["torch.distributed"].get_rank()) if world() > 1 else 0


def is_main() -> bool:
    """Whether this is the process that writes, shows progress and prints."""
    return rank() == 0


# --- from the start of a process to its end ---


@dataclass(frozen=True)
class Run:
    """This process's part in a run. `claims` counts earlier claims; None in a single process."""

    claims: Callable[[], int] | None = None

    def speaks(self) -> bool:
        """Whether this process is the one to say why the run ends: the first that asks."""
        if self.claims is None:
            return True
        try:
            return self.claims() == 1
        except RuntimeError:  # the process that counts has ended, and has spoken
            return False

    def silenced(self) -> Any:
        """Inside, only rank 0's output is seen."""
        return nullcontext() if is_main() else _silent()


@contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def joined() -> Iterator[Run]:
    """Inside, the processes that a launcher started work together; a single one is left as it is.

    A process of several then ends by `leave`.
    """
    if launched() == 1 or world() > 1:
        yield Run()
        return
    import torch
    import torch.distributed as dist

    store, number, count = next(iter(dist.rendezvous("env://", timeout=PATIENCE)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("moexp", store), rank=number, world_size=count, timeout=PATIENCE
    )
    yield Run(lambda: int(store.add("moexp-last-words", 1)))
    dist.destroy_process_group()  # after a failure the process ends as it stands: the others may be gone


def leave(code: object) -> None:
    """Ends this process at once where it is one of several, its output flushed: what the libraries that connected
    them undo at a normal end can abort it, and a run that is done would count as failed. A single process goes
    on.
    """
    if launched() > 1:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def _together() -> Iterator[Any]:
    """torch.distributed, whose errors mean that another process is gone."""
    import torch.distributed as dist

    try:
        yield dist
    except RuntimeError as error:
        raise PeerLost(str(error).splitlines()[0]) from error


# --- values, by way of the host ---


def barrier() -> None:
    """Returns when all ranks are here: what rank 0 wrote before can be read after."""
    gathered(None)


def gathered(value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    with _together() as dist:
        dist.all_gather_object(values, value)
    return values


def from_main(value: T) -> T:
    """Rank 0's value, on every rank."""
    if world() == 1:
        return value
    box = [value]
    with _together() as dist:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, which alone does it, as in a single process; the others wait."""
    if world() == 1:
        return work()
    value: Any = None
    if is_main():
        before = _alone.set(True)
        try:
            value = work()
        finally:
            _alone.reset(before)
    return from_main(value)


def any_of(flag: bool) -> bool:
    """Whether any rank says so."""
    return any(gathered(flag))


def mean(count: float) -> float:
    """The mean of all ranks' counts. A sum over this rank's tokens divided by it, averaged over the ranks, is the sum
    over all tokens divided by all.
    """
    return count if world() == 1 else sum(gathered(count)) / world()


# --- tensors, where they are ---


def share(rows: Tensor, what: str = "rows of a batch") -> Tensor:
    """This rank's part of a batch's rows: as many as any other's, in the order of ranks.

    Raises:
        MoexpError: they cannot be dealt evenly.
    """
    count, size = world(), len(rows)
    if size % count:
        fitting = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise MoexpError(f"{size} {what} for {count} processes", where="--nproc-per-node", valid=fitting)
    part = size // count
    return rows if count == 1 else rows[rank() * part : (rank() + 1) * part]


def concatenated(part: Tensor) -> Tensor:
    """All ranks' parts (of one shape), in the order of ranks. No gradient passes."""
    if world() == 1:
        return part
    import torch

    parts = [torch.empty_like(part) for _ in range(world())]
    with _together() as dist:
        dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts)


def take_main(tensors: Sequence[Tensor]) -> None:
    """Overwrites each with rank 0's."""
    if world() == 1:
        return
    with _together() as dist:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def average(tensors: Sequence[Tensor]) -> None:
    """Overwrites each with its mean over the ranks.

    Summed in the order of ranks whatever the backend, so that all ranks and all repetitions get the same bits. Each
    rank gathers what every other has, in buckets.
    """
    count = world()
    if count == 1:
        return
    import torch

    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        parts = [torch.empty_like(flat) for _ in range(count)]
        with _together() as dist:
            dist.all_gather(parts, flat)
        total = parts[0]
        for part in parts[1:]:
            total += part
        total /= count
        for tensor, mean_part in zip(bucket, total.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean_part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one type and device, of `BUCKET_BYTES` or one tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not alike or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
