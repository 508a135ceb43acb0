"""Expert stores: where routed experts are, and how they arrive. One interface for AR, drafting and verification."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import torch

from moexp.base.errors import MoexpError
from moexp.runtime.store.counters import Phase, StoreCounters
from moexp.runtime.store.direct_io import FileSource
from moexp.runtime.store.host import HostSource, load_experts
from moexp.runtime.store.pacing import CLOCK, Clock, Pacer
from moexp.runtime.store.packed import PackedFileSource, PackedHostSource
from moexp.runtime.store.policies import CachePolicy, make_policy
from moexp.runtime.store.residency import Entry, Residency
from moexp.runtime.store.slots import SlotPool, Slots
from moexp.runtime.store.transfer import Source, Transfer, TransferPool, Transport
from moexp.target.experts import ExpertIndex, ExpertKey, ExpertWeights
from moexp.target.pack_format import PackedIndex


class Ticket:
    """A demand for experts; they are pinned from `request` to `release`."""

    __slots__ = ("arrived", "entries", "keys", "left", "phase", "released")

    def __init__(self, keys: tuple[ExpertKey, ...], phase: Phase) -> None:
        self.keys = keys
        self.phase = phase
        self.released = False
        self.left = len(keys)  # not yet yielded
        self.entries: list[Entry] = []
        self.arrived: deque[Transfer] = deque()  # in memory (or failed), not yet yielded


class ExpertStore(Protocol):
    """Serves experts by key.

    `request` -> `arrivals` -> `release` is the demand path, `prefetch` announces what will probably be demanded. An
    expert is never read twice while it is in memory or on its way. All methods are called from one thread.
    """

    counters: StoreCounters
    expert_bytes: int

    def begin_cycle(self) -> None:
        """Start a decoding cycle (AR: a step). Policy `none` drops here whatever came in before (and, outside phase
        "draft", each expert as soon as it is released: a cycle demands a layer once). Prefetches whose read has not
        begun are cancelled under every policy: their cycle is over."""

    def prefetch(self, keys: Iterable[ExpertKey]) -> int:
        """Launch reads of what is neither in memory nor on its way, as far as the budget has room without giving up
        anything of this cycle. Never blocks. Returns the number launched."""

    def request(self, keys: Sequence[ExpertKey], phase: Phase) -> Ticket:
        """Demand distinct experts: pins them and starts reads of what is missing, before any queued prefetch. Never
        blocks. Outside phase "draft", queued prefetches of the same layers that were not demanded are cancelled."""

    def arrivals(self, ticket: Ticket) -> Iterator[tuple[ExpertKey, ExpertWeights]]:
        """Each expert of the ticket once, as it arrives: those already in memory first, in the order of the request.
        Blocks only for what is missing, and counts that as `stall_s`.

        Raises:
            MoexpError: an expert could not be read.
        """

    def release(self, ticket: Ticket) -> None:
        """Unpin the ticket's experts; their tensors must not be used any more. Releasing twice does nothing."""

    def settle(self) -> None:
        """Wait for what is on its way, and let the policy drop what its cycle is over for: nothing of what was done
        before is done after. No ticket may be open."""

    def close(self) -> None:
        """Stop reading and give the memory back. Closing twice does nothing. A `with` block closes at its end."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class ResidentStore:
    """All experts in memory: every demand is a hit.

    Args:
        weights: every expert.
    """

    def __init__(self, weights: Mapping[ExpertKey, ExpertWeights]) -> None:
        self.counters = StoreCounters()
        self.weights = weights
        self.expert_bytes = max(w.nbytes for w in weights.values())

    def begin_cycle(self) -> None:
        pass

    def prefetch(self, keys: Iterable[ExpertKey]) -> int:
        return 0

    def request(self, keys: Sequence[ExpertKey], phase: Phase) -> Ticket:
        for counts in (self.counters, self.counters.phases[phase]):
            counts.demanded += len(keys)
            counts.hit += len(keys)
        return Ticket(tuple(keys), phase)

    def arrivals(self, ticket: Ticket) -> Iterator[tuple[ExpertKey, ExpertWeights]]:
        for key in ticket.keys[len(ticket.keys) - ticket.left :]:
            ticket.left -= 1
            yield key, self.weights[key]

    def release(self, ticket: Ticket) -> None:
        ticket.released = True

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class SlotStore:
    """Experts that come into slots from a slower place, by demand or prefetch.

    Args:
        source: where they come from.
        policy: what stays.
        dtype: the experts' type in the slots.
        expert_bytes: weight bytes of an expert.
        budget_bytes: for experts in memory and on their way, counted as `expert_bytes` each; None: no limit. Pinned
            experts may exceed it until they are released.
        io_threads: pieces under way at once.
        pacer: emulates a slower link; its concurrency then takes the place of `io_threads`.
        prefetch_threads: of these, how many may be busy with prefetches; None: a quarter (all under a pacer). A demand
            waits for whatever the device has begun: with all eight at it, a drafting step took 1.4 times as long.
        device: where the slots are; the source must be able to fill them there.
        poison: fill freed slots with NaN (for tests).
        transport: takes the thread pool's place (for tests).
        clock: the time that stalls are measured in, and pacing is done by (for tests).

    Attributes:
        capacity: experts that the budget holds, or None.
    """

    def __init__(
        self,
        source: Source,
        policy: CachePolicy,
        *,
        dtype: torch.dtype,
        expert_bytes: int,
        budget_bytes: int | None = None,
        io_threads: int = 8,
        pacer: Pacer | None = None,
        prefetch_threads: int | None = None,
        device: torch.device | str = "cpu",
        poison: bool = False,
        transport: Transport | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        if budget_bytes is not None and budget_bytes < expert_bytes:
            raise MoexpError(
                f"a budget of {budget_bytes} bytes holds no expert",
                where="store.budget_mib",
                valid=f"from {expert_bytes}",
            )
        self.counters = StoreCounters()
        self.expert_bytes = expert_bytes
        self.source = source
        self._slots = make_slots(source.slot_bytes, dtype, torch.device(device), poison)
        self.capacity = None if budget_bytes is None else budget_bytes // expert_bytes
        self._residency = Residency(policy, self.capacity, self.counters, self._free, self._cancel)
        if prefetch_threads is None and pacer is None:
            prefetch_threads = max(1, io_threads // 4)
        self._transport = transport or TransferPool(source, io_threads, pacer, prefetch_threads, clock)
        self._landed = self._transport.landed
        self._clock = clock
        self._closed = False
        # A store that nobody closed leaves no threads behind; but a dead device must not hold the process then.
        weakref.finalize(self, self._transport.close, wait=False).atexit = False

    def begin_cycle(self) -> None:
        self._drain()
        self._residency.begin_cycle()

    def prefetch(self, keys: Iterable[ExpertKey]) -> int:
        self._check_open()
        self._drain()
        launched = self._residency.prefetch(keys)
        self._start(launched, urgent=False)
        return len(launched)

    def request(self, keys: Sequence[ExpertKey], phase: Phase) -> Ticket:
        self._check_open()
        self._drain()
        ticket = Ticket(tuple(keys), phase)
        ticket.entries, missing, late = self._residency.demand(ticket.keys, phase)
        if missing:
            self._start(missing, urgent=True)
        if late:
            self._transport.promote([entry.payload for entry in late])
        for entry in ticket.entries:
            if entry.ready:
                ticket.arrived.append(entry.payload)
            else:
                entry.payload.waiting.append(ticket.arrived)
        return ticket

    def arrivals(self, ticket: Ticket) -> Iterator[tuple[ExpertKey, ExpertWeights]]:
        arrived = ticket.arrived
        while ticket.left:
            assert not ticket.released, "arrivals after release"
            self._check_open()
            if not arrived:
                self._wait(ticket)
            transfer = arrived.popleft()
            ticket.left -= 1
            if transfer.error is not None:
                layer, expert = transfer.key
                raise MoexpError(
                    f"cannot bring in expert {expert} of layer {layer}: {transfer.error}"
                ) from transfer.error
            yield transfer.key, transfer.weights

    def release(self, ticket: Ticket) -> None:
        if not ticket.released:
            ticket.released = True
            self._residency.release(ticket.entries, ticket.phase)

    def settle(self) -> None:
        self._check_open()
        self._residency.cancel_all()
        while not self._residency.quiet:
            self._land(self._landed.get())
        self.begin_cycle()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._residency.cancel_all()
            self._transport.close()
            self._drain()
            self._residency.clear()
            self._slots.clear()
        finally:
            self._transport.close()
            self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise MoexpError("the expert store is closed")

    def _start(self, entries: list[Entry], urgent: bool) -> None:
        transfers = []
        for entry in entries:
            entry.payload = Transfer(entry, self.source.plan(entry.key), self._slots.take())
            transfers.append(entry.payload)
        self._transport.start(transfers, urgent)

    def _wait(self, ticket: Ticket) -> None:
        """Until something of the ticket is there."""
        self._drain()
        if ticket.arrived:
            return
        begin_s = self._clock.now_s()
        while not ticket.arrived:
            self._land(self._landed.get())
        stall_s = self._clock.now_s() - begin_s
        self.counters.stall_s += stall_s
        self.counters.phases[ticket.phase].stall_s += stall_s

    def _drain(self) -> None:
        landed = self._landed
        while not landed.empty():  # only this thread takes from it
            self._land(landed.get())

    def _land(self, transfer: Transfer) -> None:
        entry: Entry = transfer.owner
        for arrived in transfer.waiting:
            arrived.append(transfer)
        if transfer.error is None:
            transfer.view()
            self._residency.landed(entry, transfer.plan.moved_bytes)
        else:
            self._residency.failed(entry)

    def _free(self, entry: Entry) -> None:
        if entry.payload is not None:  # interrupted before its transfer was made
            self._slots.give(entry.payload.slot)

    def _cancel(self, entry: Entry) -> bool:
        return entry.payload is None or self._transport.cancel(entry.payload)


READ_SPLITS = 2
"""Pieces an expert is read in from disk: more keep the device busy until the last expert of a small request is in."""

STORE_KINDS = ("resident", "host", "disk")


def open_store(
    index: ExpertIndex,
    kind: str = "disk",
    *,
    policy: str = "none",
    demands: Mapping[ExpertKey, float] | None = None,
    budget_bytes: int | None = None,
    io_threads: int = 8,
    pacer: Pacer | None = None,
    prefetch_threads: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    poison: bool = False,
) -> ExpertStore:
    """Open a store over a checkpoint's experts.

    Args:
        index: where the experts are.
        kind: "resident" (all in the device's memory, nothing moves), "host" (all in host memory, copied into slots) or
            "disk" (read into slots).
        policy: a key of `cache.POLICIES`; a resident store needs none.
        demands: how often each expert was demanded, for the policy "static-hot".
        dtype: of the weights served; by default as stored. The disk store decodes what is quantised or laid out
            otherwise; plain weights it serves as they are.
        device: where they are served; the disk store serves host memory only.
        budget_bytes, io_threads, pacer, prefetch_threads, poison: as in `SlotStore`.

    Raises:
        MoexpError: an unknown kind or policy, a budget below one expert, a dtype or device that the kind cannot
            serve, or a shard that cannot be opened.
    """
    if kind not in STORE_KINDS:
        raise MoexpError(f"unknown store kind {kind!r}", where="store.kind", valid=", ".join(STORE_KINDS))
    rule = make_policy(policy, demands)
    dtype, device = dtype or index.dtype, torch.device(device)
    if kind == "disk" and (not index.converts_to(dtype) or device.type != "cpu"):
        wanted = f"experts on disk are {index.dtype} and go to host memory, not {dtype} on {device}"
        raise MoexpError(wanted, where="store.kind", valid="host, resident")
    if kind == "resident":
        return ResidentStore(
            {
                key: ExpertWeights(*(tensor.to(device) for tensor in expert.tensors))
                for key, expert in load_experts(index, dtype).items()
            }
        )
    source: Source
    if kind == "disk":
        splits = 1 if pacer else READ_SPLITS
        if isinstance(index, PackedIndex):
            source = PackedFileSource(index, splits)
        else:
            source = FileSource(index, splits=splits, dtype=dtype)
    elif device.type == "cuda":
        from moexp.runtime.store.cuda import PinnedSource

        source = PinnedSource(load_experts(index, dtype), device)
    elif isinstance(index, PackedIndex) and dtype == index.dtype:
        source = PackedHostSource(index)
    else:
        source = HostSource(load_experts(index, dtype))
    return SlotStore(
        source,
        rule,
        dtype=dtype,
        expert_bytes=index.expert_bytes * dtype.itemsize // index.dtype.itemsize,
        budget_bytes=budget_bytes,
        io_threads=io_threads,
        pacer=pacer,
        prefetch_threads=prefetch_threads,
        device=device,
        poison=poison,
    )


def make_slots(slot_bytes: int, dtype: torch.dtype, device: torch.device, poison: bool) -> SlotPool:
    """Slots in the memory of `device`."""
    if device.type == "cuda":
        from moexp.runtime.store.cuda import CudaSlots

        return CudaSlots(slot_bytes, dtype, device, poison=poison)
    return Slots(slot_bytes, dtype, poison=poison)
