"""What takes the place of the transfer pool and of the clock, so that a test says when a transfer lands."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

from moexp.runtime.store.pacing import Clock
from moexp.runtime.store.transfer import Source, Transfer
from moexp.sim.machine.link import Flight, LinkModel, VirtualLink


class FakeClock(Clock):
    """Stands still but when a test moves it, or when somebody waits for a time: then it is that time."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, due_s: float, closing: threading.Event) -> None:
        with self._lock:
            self.time_s = max(self.time_s, due_s)


def bring(source: Source, transfer: Transfer) -> None:
    """All that the pool's threads do for a transfer, at once."""
    for piece in transfer.plan.pieces:
        source.move(transfer, piece)
    source.finish(transfer)


class InstantTransport:
    """A transfer has landed when it has started."""

    def __init__(self, source: Source) -> None:
        self.source, self.landed = source, SimpleQueue[Any]()

    def start(self, transfers: Iterable[Transfer], urgent: bool) -> None:
        for transfer in transfers:
            bring(self.source, transfer)
            self.landed.put(transfer)

    def promote(self, transfers: Iterable[Transfer]) -> None:
        pass

    def cancel(self, transfer: Transfer) -> bool:
        return False

    def close(self, wait: bool = True) -> None:
        pass


class HandTransport:
    """A transfer begins and lands when the test says so, or when the store blocks for it."""

    class Landed(deque):
        def __init__(self, transport: HandTransport) -> None:
            super().__init__()
            self.transport = transport

        def empty(self) -> bool:
            return not self

        def get(self) -> Transfer:
            if not self:
                assert self.transport.coming, "the store waits for something that nobody brings"
                self.transport.land(self.transport.rng.choice(self.transport.coming))
            return self.popleft()

    def __init__(self, source: Any, seed: int) -> None:
        self.source, self.rng = source, random.Random(seed)
        self.coming: list[Transfer] = []
        self.begun: list[Transfer] = []
        self.started: list[Any] = []  # keys, in order, of every transfer ever started
        self.landed: Any = self.Landed(self)

    def start(self, transfers: Iterable[Transfer], urgent: bool) -> None:
        for transfer in transfers:
            assert all(other.slot is not transfer.slot for other in self.coming), "two experts in one slot"
            assert all(other.key != transfer.key for other in self.coming), "read twice"
            self.coming.append(transfer)
            self.started.append(transfer.key)

    def promote(self, transfers: Iterable[Transfer]) -> None:
        assert all(any(transfer is other for other in self.coming) for transfer in transfers)

    def cancel(self, transfer: Transfer) -> bool:
        if any(transfer is other for other in self.begun) or not any(transfer is other for other in self.coming):
            return False
        self.coming = [other for other in self.coming if other is not transfer]
        return True

    def begin(self, transfer: Transfer) -> None:
        self.begun.append(transfer)

    def land(self, transfer: Transfer) -> None:
        self.coming = [other for other in self.coming if other is not transfer]
        if transfer.key in self.source.failing:
            transfer.error = OSError("broken")
        else:
            self.source.finish(transfer)
        self.landed.append(transfer)

    def close(self, wait: bool = True) -> None:
        for transfer in self.begun:
            if any(transfer is other for other in self.coming):
                self.land(transfer)


class LinkTransport:
    """Transfers land when a virtual link says so; its time passes where the store blocks, and where a test moves it."""

    def __init__(self, source: Source, model: LinkModel, expert_bytes: int) -> None:
        self.source, self.link = source, VirtualLink(model, expert_bytes)
        self.flights: dict[int, Flight] = {}
        self.landed: Any = self
        self.arrived: deque[Transfer] = deque()

    def start(self, transfers: Iterable[Transfer], urgent: bool) -> None:
        started = [Flight(transfer, transfer.key[0]) for transfer in transfers]
        self.flights |= {id(flight.owner): flight for flight in started}
        self.link.start(started, urgent)

    def promote(self, transfers: Iterable[Transfer]) -> None:
        self.link.promote([self.flights[id(transfer)] for transfer in transfers])

    def cancel(self, transfer: Transfer) -> bool:
        return self.link.cancel(self.flights[id(transfer)])

    def empty(self) -> bool:
        self.link.advance(self.link.now_s)  # of several that land at one moment, a wait lands the first
        self._take()
        return not self.arrived

    def get(self) -> Transfer:
        if not self.arrived:
            self.link.wait()
            self._take()
        return self.arrived.popleft()

    def _take(self) -> None:
        for flight in self.link.landed:
            bring(self.source, flight.owner)
            self.arrived.append(flight.owner)
        self.link.landed.clear()

    def close(self, wait: bool = True) -> None:
        while self.link.next_s < float("inf"):
            self.link.wait()
