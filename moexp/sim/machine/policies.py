"""Cache policies of simulated runs: the runtime's, and one that knows the future (a bound)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from moexp.base.errors import MoexpError
from moexp.runtime.store.policies import POLICIES, CachePolicy, make_policy
from moexp.sim.machine.cycles import Cycle

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey

BELADY = "belady"
CACHES = (*POLICIES, BELADY)
"""Cache policies that can be simulated."""
NEVER = 1 << 62


def cache_policy(name: str, cycles: Iterable[Cycle], demands: Mapping[ExpertKey, float] | None = None) -> CachePolicy:
    """A new policy for a run of these cycles.

    Args:
        name: one of `CACHES`.
        demands: the histogram of "static-hot".

    Raises:
        MoexpError: an unknown policy, or one that lacks its histogram.
    """
    if name == BELADY:
        return Belady(demand_order(cycles))
    if name not in POLICIES:
        raise MoexpError(f"unknown cache policy {name!r}", where="cache", valid=", ".join(CACHES))
    return make_policy(name, demands)


def demand_order(cycles: Iterable[Cycle]) -> Iterator[ExpertKey]:
    """Every demand that walking the cycles will make, in order."""
    return (key for cycle in cycles for step in cycle.steps() for keys in step.demands for key in keys)


class Belady:
    """Gives up what will be demanded latest. On demands alone, nothing misses less.

    Args:
        demands: all of the future, in order.
    """

    keeps = True
    spares_cycle = False

    def __init__(self, demands: Iterable[ExpertKey]) -> None:
        self._uses: dict[ExpertKey, deque[int]] = {}
        for index, key in enumerate(demands):
            self._uses.setdefault(key, deque()).append(index)
        self._present: set[ExpertKey] = set()
        # Every present expert under its next use, and outdated entries, which are dropped when they come up.
        self._heap: list[tuple[int, ExpertKey]] = []

    def on_insert(self, key: ExpertKey) -> None:
        self._present.add(key)
        heapq.heappush(self._heap, (-self._next(key), key))

    def on_demand(self, key: ExpertKey) -> None:
        self._uses[key].popleft()
        heapq.heappush(self._heap, (-self._next(key), key))

    def on_drop(self, key: ExpertKey) -> None:
        self._present.discard(key)

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        refused: list[tuple[int, ExpertKey]] = []
        victim = None
        while self._heap:
            use, key = item = self._heap[0]
            if key in self._present and -use == self._next(key):
                if allowed(key):
                    victim = key
                    break
                refused.append(item)
            heapq.heappop(self._heap)
        for item in set(refused):
            heapq.heappush(self._heap, item)
        return victim

    def _next(self, key: ExpertKey) -> int:
        uses = self._uses.get(key)
        return uses[0] if uses else NEVER
