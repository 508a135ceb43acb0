"""The cache policy that knows the future: a bound, for the simulator only."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from moexp.sim.walk import Cycle, Step

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey

NEVER = 1 << 62


def demand_order(cycles: Iterable[Cycle]) -> Iterator[ExpertKey]:
    """Every demand that walking the cycles will make, in order."""
    for cycle in cycles:
        for event in cycle.events:
            if isinstance(event, Step):
                for keys in event.demands:
                    yield from keys


class Belady:
    """Gives up what will be demanded latest. On demands alone, nothing misses less.

    Args:
        demands: all of the future, in order.
    """

    keeps = True
    spares_cycle = False

    def __init__(self, demands: Iterable[ExpertKey]) -> None:
        self._uses: dict[ExpertKey, deque[int]] = {}
        for place, key in enumerate(demands):
            self._uses.setdefault(key, deque()).append(place)
        self._present: set[ExpertKey] = set()
        # Every present expert under its next use, and older entries, which are thrown away when they come up.
        self._heap: list[tuple[int, ExpertKey]] = []

    def on_insert(self, key: ExpertKey) -> None:
        self._present.add(key)
        heapq.heappush(self._heap, (-self._next(key), key))

    def on_demand(self, key: ExpertKey) -> None:
        self._uses[key].popleft()
        heapq.heappush(self._heap, (-self._next(key), key))

    def on_drop(self, key: ExpertKey) -> None:
        self._present.discard(key)

    def begin_cycle(self) -> None:
        pass

    def victim(self, allowed: Callable[[ExpertKey], bool], resting: bool = False) -> ExpertKey | None:
        refused: list[tuple[int, ExpertKey]] = []
        found = None
        while self._heap and found is None:
            use, key = item = self._heap[0]
            if key in self._present and -use == self._next(key):
                if allowed(key):
                    found = key
                    break
                refused.append(item)
            heapq.heappop(self._heap)
        for item in set(refused):
            heapq.heappush(self._heap, item)
        return found

    def _next(self, key: ExpertKey) -> int:
        uses = self._uses.get(key)
        return uses[0] if uses else NEVER
