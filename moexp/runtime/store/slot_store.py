"""A store of experts that come into slots from a slower medium."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from moexp.base.errors import MoexpError
from moexp.runtime.store.counters import Phase, StoreCounters
from moexp.runtime.store.policies import CachePolicy
from moexp.runtime.store.residency import Entry, Residency
from moexp.runtime.store.slots import Slots
from moexp.runtime.store.store import ExpertStore, Ticket
from moexp.runtime.store.transfer import Source, StoreOptions, Transfer, TransferPool
from moexp.target.experts import ExpertKey, ExpertWeights


class SlotStore(ExpertStore):
    """Experts that come into slots from a slower medium, by demand or prefetch.

    Args:
        source: where they come from.
        policy: what stays.
        dtype: the experts' type in the slots.
        expert_bytes: weight bytes of an expert.
        budget_bytes: for experts in memory and on their way, counted as `expert_bytes` each; None: no limit. Pinned
            experts may exceed it until they are released.
        device: where the slots are; the source must be able to fill them there.
        options: how experts are moved.
        transport: instead of the thread pool (for tests).

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
        device: torch.device | str = "cpu",
        options: StoreOptions = StoreOptions(),  # noqa: B008
        transport: TransferPool | None = None,
    ) -> None:
        if budget_bytes is not None and budget_bytes < expert_bytes:
            what = f"a budget of {budget_bytes} bytes holds no expert"
            raise MoexpError(what, where="store.budget_mib", valid=f"from {expert_bytes}")
        self.counters = StoreCounters()
        self.expert_bytes = expert_bytes
        self.source = source
        self._slots = _make_slots(source.slot_bytes, dtype, torch.device(device), options.poison)
        self.capacity = None if budget_bytes is None else budget_bytes // expert_bytes
        self._residency: Residency[Transfer] = Residency(policy, self.capacity, self.counters, self._free, self._cancel)
        self._transport = transport or TransferPool(source, options)
        self._landed = self._transport.landed
        self._clock = options.clock
        self._closed = False
        # A store that was never closed leaves no threads behind; but a dead device must not hold the process then.
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
            self._transport.promote([entry.started for entry in late])
        for entry in ticket.entries:
            transfer = entry.started
            if entry.ready:
                ticket.arrived.append(transfer)
            else:
                transfer.waiting.append(ticket.arrived)
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
                what = f"cannot bring in expert {expert} of layer {layer}: {transfer.error}"
                raise MoexpError(what) from transfer.error
            yield transfer.key, transfer.weights

    def release(self, ticket: Ticket) -> None:
        if not ticket.released:
            ticket.released = True
            self._residency.release(ticket.entries, ticket.phase)

    def settle(self) -> None:
        self._check_open()
        self._residency.cancel_all()
        while not self._residency.is_idle:
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

    def _check_open(self) -> None:
        if self._closed:
            raise MoexpError("the expert store is closed")

    def _start(self, entries: list[Entry[Transfer]], urgent: bool) -> None:
        transfers = []
        for entry in entries:
            entry.transfer = Transfer(entry.key, self.source.plan(entry.key), self._slots.take())
            transfers.append(entry.transfer)
        self._transport.start(transfers, urgent)

    def _wait(self, ticket: Ticket) -> None:
        """Until something of the ticket has arrived."""
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
        entry = self._residency.entries[transfer.key]
        for arrived in transfer.waiting:
            arrived.append(transfer)
        if transfer.error is None:
            transfer.view()
            self._residency.landed(entry, transfer.plan.moved_bytes)
        else:
            self._residency.failed(entry)

    def _free(self, entry: Entry[Transfer]) -> None:
        if entry.transfer is not None:
            self._slots.give(entry.transfer.slot)

    def _cancel(self, entry: Entry[Transfer]) -> bool:
        return entry.transfer is None or self._transport.cancel(entry.transfer)


def _make_slots(slot_bytes: int, dtype: torch.dtype, device: torch.device, poison: bool) -> Slots:
    if device.type == "cuda":
        from moexp.runtime.store.cuda import CudaSlots  # only where there is a GPU

        return CudaSlots(slot_bytes, dtype, device, poison=poison)
    return Slots(slot_bytes, dtype, poison=poison)
