"""The link under a virtual clock, by the order of `moexp.runtime.store.transfer`: an expert is one transfer.

Urgent transfers go first, in their order of arrival; then queued prefetches, those of the lowest layer first, at most
`background` of them at once. What has begun is never put off. Promoted transfers join the urgent ones, cancelled ones
never begin.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moexp.base.errors import MoexpError
from moexp.runtime.store.pacing import Pacer


@dataclass(frozen=True)
class LinkModel:
    """How long transfers take.

    Behind its latency, each of n transfers under way gets min(alone, bandwidth / n) at every moment: those that begin
    together land together, as reads of a disk do.

    Attributes:
        bandwidth_bytes_s: of all transfers together.
        alone_bytes_s: of a transfer that has the link for itself; None: all of it.
        latency_s: before a transfer's first byte.
        concurrency: transfers under way at once.
        background: of these, how many may be prefetches; None: all.
        serial: transfers follow each other by the rule of emulated platforms, `moexp.runtime.store.pacing.Pacer`.
    """

    bandwidth_bytes_s: float
    alone_bytes_s: float | None = None
    latency_s: float = 0.0
    concurrency: int = 8
    background: int | None = None
    serial: bool = False

    def __post_init__(self) -> None:
        possible = self.bandwidth_bytes_s > 0 and self.latency_s >= 0 and self.concurrency >= 1
        if not possible or (self.alone_bytes_s or 1) <= 0 or (self.background or 1) < 1:
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
        landed: flights that have landed, in order; the caller empties it.
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
        self._queued_count = 0
        self._pacer: Pacer | None = None
        self._bytes = flight_bytes
        # Flights that share the link get the same and have the same size: they land in the order in which they joined,
        # each once the share of one flight has grown by its size.
        self._joining: deque[tuple[float, Flight]] = deque()  # (time at which its latency is over, flight)
        self._sharing: deque[tuple[float, Flight]] = deque()  # (share at which it lands, flight)
        self._share = 0.0  # bytes that a flight has got which shares the link from the beginning
        self._since_s = 0.0  # when that was so
        self.reprice(model)

    def reprice(self, model: LinkModel) -> None:
        """From now on transfers take as long as another model says; its concurrency is the same."""
        if self._pacer is not None and self._pacer.bandwidth_bytes_s == model.bandwidth_bytes_s:
            return
        self._grow(self.now_s)
        alone = model.alone_bytes_s or model.bandwidth_bytes_s
        self._latency_s = model.latency_s
        self._rates = [min(alone, model.bandwidth_bytes_s / max(1, n)) for n in range(model.concurrency + 1)]
        self._pacer = Pacer(model.bandwidth_bytes_s, model.latency_s, model.concurrency) if model.serial else None
        self._look_ahead()

    def start(self, flights: Sequence[Flight], urgent: bool) -> None:
        """Queue flights at the present time."""
        if urgent:
            self._urgent.extend(flights)
        else:
            for flight in flights:
                self._queued_count += 1
                heapq.heappush(self._queued, (flight.layer, self._queued_count, flight))
        self._dispatch()

    def promote(self, flights: Iterable[Flight]) -> None:
        """Make queued flights urgent; what has begun is left alone."""
        self._urgent.extend(flight for flight in flights if not flight.begun)
        self._dispatch()

    def cancel(self, flight: Flight) -> bool:
        """Forget a flight that has not begun: True, and it will never land."""
        if flight.begun:
            return False
        flight.begun = True  # it will not be dispatched
        return True

    def advance(self, now_s: float) -> None:
        """Let the clock go on to `now_s` (at least the present time), landing what lands until then."""
        while self.next_s <= now_s:
            self._next()
        self.now_s = now_s

    def wait(self) -> None:
        """Let the clock go on until the next flight lands."""
        assert self._joining or self._sharing, "waiting while nothing is under way"
        while not self._next():
            pass

    def _next(self) -> bool:
        """What happens next, a flight's joining or landing; whether it is a landing."""
        now_s = self.now_s = self.next_s
        joining, sharing = self._joining, self._sharing
        self._grow(now_s)
        if joining and joining[0][0] <= now_s and self._pacer is None:
            sharing.append((self._share + self._bytes, joining.popleft()[1]))
            self._look_ahead()
            return False
        if sharing:
            self._share, flight = sharing.popleft()  # the exact share: the clock rounds
        else:
            flight = joining.popleft()[1]
        self.landed.append(flight)
        if flight.background:
            self._background_now -= 1
        if self._urgent or self._queued:
            self._dispatch()
        else:
            self._look_ahead()
        return True

    def _grow(self, now_s: float) -> None:
        """The share up to now."""
        if self._sharing:
            self._share += (now_s - self._since_s) * self._rates[len(self._sharing)]
        self._since_s = now_s

    def _look_ahead(self) -> None:
        """Set `next_s`."""
        next_s = self._joining[0][0] if self._joining else float("inf")
        if self._sharing:
            left = self._sharing[0][0] - self._share
            next_s = min(next_s, self._since_s + max(0.0, left) / self._rates[len(self._sharing)])
        self.next_s = next_s

    def _dispatch(self) -> None:
        """Begin what can begin."""
        urgent, queued, joining, sharing = self._urgent, self._queued, self._joining, self._sharing
        begun = False
        while len(joining) + len(sharing) < self._concurrency:
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
                joining.append((self._pacer.reserve(self._bytes, self.now_s), flight))
            elif self._latency_s:
                joining.append((self.now_s + self._latency_s, flight))
            else:
                if not begun:
                    self._grow(self.now_s)
                    begun = True
                sharing.append((self._share + self._bytes, flight))
        self._look_ahead()
