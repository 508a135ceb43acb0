"""The link under a virtual clock, by the rules of `moexp.runtime.transfer.TransferPool`: an expert is one transfer.

Urgent transfers go first, in the order they came; then queued prefetches, those of the lowest layer first, at most
`background` of them at once. What has begun is never put off. Promoted transfers join the urgent ones, cancelled ones
never begin.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moexp.errors import MoexpError
from moexp.runtime.pacing import Pacer


@dataclass(frozen=True)
class LinkModel:
    """How long transfers take.

    Shared link: a transfer takes latency + bytes / min(alone, bandwidth / transfers under way when it begins, itself
    included). That it does not change while others come and go is an approximation, but together they never exceed
    the bandwidth: the j-th to begin since the link was idle, with n under way, follows at least j - n that have ended,
    so by induction it ends no sooner than j x bytes / bandwidth after the first began.

    Serial link (`serial`): `moexp.runtime.pacing.Pacer`'s rule, which emulated platforms follow.

    Attributes:
        bandwidth_bytes_s: of all transfers together.
        alone_bytes_s: of a transfer that has the link for itself; None: all of it.
        latency_s: before a transfer's first byte.
        concurrency: transfers under way at once.
        background: of these, how many may be prefetches; None: all.
        serial: the Pacer's rule.
    """

    bandwidth_bytes_s: float
    alone_bytes_s: float | None = None
    latency_s: float = 0.0
    concurrency: int = 8
    background: int | None = None
    serial: bool = False

    def __post_init__(self) -> None:
        fine = self.bandwidth_bytes_s > 0 and self.latency_s >= 0 and self.concurrency >= 1
        if not fine or (self.alone_bytes_s or 1) <= 0 or (self.background or 1) < 1:
            raise MoexpError(f"a link that cannot be: {self}", valid="rates above 0, latency from 0, counts from 1")


class Flight:
    """One transfer. `owner` is the caller's; `layer` says how urgent a prefetch is."""

    __slots__ = ("background", "begun", "layer", "owner", "tickets")

    def __init__(self, owner: Any, layer: int) -> None:
        self.owner = owner
        self.layer = layer
        self.begun = False
        self.background = False  # begun as a prefetch
        self.tickets: list[Any] | None = None  # the store's: who waits for it


class VirtualLink:
    """Flights, and the time at which each lands.

    Args:
        model: how long transfers take.
        flight_bytes: of each.

    Attributes:
        now_s: the clock; it only goes forward.
        landed: flights that have landed and were not yet taken, in order; the caller empties it.
        next_s: when the next one lands; infinite where none is under way.
    """

    def __init__(self, model: LinkModel, flight_bytes: int) -> None:
        self.now_s = 0.0
        self.landed: list[Flight] = []
        self.next_s = float("inf")
        self._concurrency = model.concurrency
        self._background_limit = min(model.background or model.concurrency, model.concurrency)
        self._background_now = 0
        self._urgent: deque[Flight] = deque()
        self._queued: list[tuple[int, int, Flight]] = []
        self._under_way: list[tuple[float, int, Flight]] = []
        self._running_number = 0
        self._pacer = Pacer(model.bandwidth_bytes_s, model.latency_s, model.concurrency) if model.serial else None
        self._bytes = flight_bytes
        # Seconds of a transfer by how many are under way when it begins.
        alone = model.alone_bytes_s or model.bandwidth_bytes_s
        self._service_s = [0.0] + [
            model.latency_s + flight_bytes / min(alone, model.bandwidth_bytes_s / sharing)
            for sharing in range(1, model.concurrency + 1)
        ]

    def start(self, flights: Sequence[Flight], urgent: bool) -> None:
        """Queue flights at the present time."""
        if urgent:
            self._urgent.extend(flights)
        else:
            for flight in flights:
                self._running_number += 1
                heapq.heappush(self._queued, (flight.layer, self._running_number, flight))
        self._dispatch()

    def promote(self, flights: Iterable[Flight]) -> None:
        """Make queued flights urgent; what has begun is left alone."""
        self._urgent.extend(flight for flight in flights if not flight.begun)
        self._dispatch()

    def cancel(self, flight: Flight) -> bool:
        """Forget a flight that has not begun: True, and it will never land."""
        if flight.begun:
            return False
        flight.begun = True  # so that nobody begins it
        return True

    def advance(self, now_s: float) -> None:
        """Let the clock go on to `now_s` (at least the present time), landing what lands until then."""
        while self.next_s <= now_s:
            self._land()
        self.now_s = now_s

    def wait(self) -> None:
        """Let the clock go on until the next flight lands."""
        assert self._under_way, "waiting for something that nobody brings"
        self._land()

    def _land(self) -> None:
        under_way = self._under_way
        self.now_s, _, flight = heapq.heappop(under_way)
        self.landed.append(flight)
        if flight.background:
            self._background_now -= 1
        self.next_s = under_way[0][0] if under_way else float("inf")
        if self._urgent or self._queued:
            self._dispatch()

    def _dispatch(self) -> None:
        """Begin what can begin."""
        urgent, queued, under_way = self._urgent, self._queued, self._under_way
        while len(under_way) < self._concurrency:
            if urgent:
                flight = urgent.popleft()
                if flight.begun:  # promoted after it had begun, or cancelled
                    continue
            elif queued and self._background_now < self._background_limit:
                flight = heapq.heappop(queued)[2]
                if flight.begun:
                    continue
                flight.background = True
                self._background_now += 1
            else:
                break
            flight.begun = True
            if self._pacer is not None:
                ends_s = self._pacer.reserve(self._bytes, self.now_s)
            else:
                ends_s = self.now_s + self._service_s[len(under_way) + 1]
            self._running_number += 1
            heapq.heappush(under_way, (ends_s, self._running_number, flight))
        if under_way:
            self.next_s = under_way[0][0]
