"""An expert store without experts: the runtime's own bookkeeping over a virtual link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moexp.runtime.store.counters import Phase, StoreCounters
from moexp.runtime.store.policies import CachePolicy
from moexp.runtime.store.residency import Entry, Residency
from moexp.sim.machine.link import Flight, LinkModel, VirtualLink

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey


class Ticket:
    """A demand. `ready`: its experts that are in memory and not computed yet; `left`: those still on their way."""

    __slots__ = ("entries", "left", "phase", "ready")

    def __init__(self, entries: list[Entry[Flight]], phase: Phase, ready: int) -> None:
        self.entries = entries
        self.phase = phase
        self.ready = ready
        self.left = len(entries) - ready


class VirtualStore:
    """`SlotStore` under a virtual clock: every call gives its time (seconds, never earlier than the call before), and
    notices landings where the real store's call does. Arguments are those of `moexp.sim.machine.machine.MachineModel`.
    """

    def __init__(self, policy: CachePolicy, capacity: int | None, link: LinkModel, expert_bytes: int) -> None:
        self.counters = StoreCounters()
        self.capacity = capacity
        self.link = VirtualLink(link, expert_bytes)
        self._bytes = expert_bytes
        self._residency: Residency[Flight] = Residency(
            policy, capacity, self.counters, lambda entry: None, self._cancel
        )

    def begin_cycle(self, now_s: float) -> None:
        """See `ExpertStore`."""
        self._drain(now_s)
        self._residency.begin_cycle()

    def prefetch(self, keys: Iterable[ExpertKey], now_s: float) -> int:
        """See `ExpertStore`."""
        self._drain(now_s)
        launched = self._residency.prefetch(keys)
        if launched:
            self.link.start(self._flights(launched), False)
        return len(launched)

    def request(self, keys: Sequence[ExpertKey], phase: Phase, now_s: float) -> Ticket:
        """See `ExpertStore`."""
        self._drain(now_s)
        entries, missing, late = self._residency.demand(keys, phase)
        ticket = Ticket(entries, phase, len(entries) - len(missing) - len(late))
        if missing:
            flights = self._flights(missing)
            for flight in flights:
                flight.tickets = [ticket]
            self.link.start(flights, True)
        if late:
            for entry in late:
                entry.started.tickets = [*(entry.started.tickets or ()), ticket]
            self.link.promote([entry.started for entry in late])
        return ticket

    def wait(self, ticket: Ticket, now_s: float) -> float:
        """The time at which an expert of the ticket is in memory; `now_s` where one is already."""
        self._drain(now_s)
        if ticket.ready:
            return now_s
        while not ticket.ready:
            self.link.wait()
            self._take()
        stall_s = self.link.now_s - now_s
        self.counters.stall_s += stall_s
        self.counters.phases[ticket.phase].stall_s += stall_s
        return self.link.now_s

    def release(self, ticket: Ticket) -> None:
        """See `ExpertStore`."""
        self._residency.release(ticket.entries, ticket.phase)

    def settle(self, now_s: float) -> float:
        """See `ExpertStore`; the time at which nothing is on its way any more."""
        self._drain(now_s)
        self._residency.cancel_all()
        while self.link.next_s < float("inf"):
            self.link.wait()
            self._take()
        self._residency.begin_cycle()
        return max(now_s, self.link.now_s)

    def reprice(self, link: LinkModel) -> None:
        """From now on transfers take as long as another model says."""
        self.link.reprice(link)

    def close(self, now_s: float) -> None:
        """Let what has begun land, forget the rest; every prefetch is used or wasted then."""
        self.settle(now_s)
        self._residency.clear()

    def _drain(self, now_s: float) -> None:
        link = self.link
        if link.next_s <= now_s:
            link.advance(now_s)
        else:
            link.now_s = now_s
        if link.landed:
            self._take()

    def _take(self) -> None:
        landed, residency = self.link.landed, self._residency
        for flight in landed:
            if flight.tickets is not None:
                for ticket in flight.tickets:
                    ticket.ready += 1
                    ticket.left -= 1
            residency.landed(flight.owner, self._bytes)
            flight.owner = None  # no circle of references is left for the collector
        landed.clear()

    def _flights(self, entries: list[Entry[Flight]]) -> list[Flight]:
        flights = []
        for entry in entries:
            entry.transfer = flight = Flight(entry, entry.key[0])
            flights.append(flight)
        return flights

    def _cancel(self, entry: Entry[Flight]) -> bool:
        if not self.link.cancel(entry.started):
            return False
        entry.transfer = None
        return True
