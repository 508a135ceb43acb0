"""Emulating a slower link: when a transfer that starts now would have ended there."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from moexp.base.errors import MoexpError


class Clock:
    """The time that stores measure stalls and pace transfers by. Tests drive another in its place."""

    def now_s(self) -> float:
        """Seconds since any fixed moment."""
        return time.perf_counter()

    def wait_until(self, due_s: float, closing: threading.Event) -> None:
        """Sleep until `due_s`, or until `closing` is set."""
        closing.wait(max(0.0, due_s - self.now_s()))


CLOCK = Clock()


@dataclass
class Pacer:
    """A shared link with a busy-until clock.

    Each transfer waits `latency_s` (waits overlap) and then for its turn on the link, which carries
    `bandwidth_bytes_s` in all. At most `concurrency` transfers are under way; later ones queue by priority before
    they reserve anything, so `concurrency` also says how much a demand can find ahead of it.
    """

    bandwidth_bytes_s: float
    latency_s: float = 0.0
    concurrency: int = 1
    _free_s: float = field(default=0.0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_s <= 0 or self.latency_s < 0 or self.concurrency < 1:
            raise MoexpError(
                f"bandwidth {self.bandwidth_bytes_s:g} bytes/s, latency {self.latency_s:g} s, "
                f"concurrency {self.concurrency}",
                where="store.pace",
                valid="bandwidth above 0, latency from 0, concurrency from 1",
            )

    def reserve(self, transfer_bytes: int, now_s: float) -> float:
        """Take the link for a transfer that starts at `now_s`; the time at which it ends there."""
        with self._lock:
            self._free_s = max(now_s + self.latency_s, self._free_s) + transfer_bytes / self.bandwidth_bytes_s
            return self._free_s
