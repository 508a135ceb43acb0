"""Which expert to give up when memory is full: small objects without I/O, shared by the stores and the simulator."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from moexp.errors import MoexpError
from moexp.target.experts import ExpertKey


class CachePolicy(Protocol):
    """Orders the experts that are in memory or on their way.

    `keeps`: whether experts stay from one decoding cycle to the next. `on_insert` is told of every expert that starts
    to come in, `on_demand` of every demand (for a miss: after `on_insert`), `on_drop` of every expert that leaves.
    `victim` names the first expert, in the policy's order, that `allowed` accepts; it does not drop it.
    """

    keeps: bool

    def on_insert(self, key: ExpertKey) -> None: ...

    def on_demand(self, key: ExpertKey) -> None: ...

    def on_drop(self, key: ExpertKey) -> None: ...

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None: ...


class LeastRecent:
    """Gives up what was demanded (or came in) longest ago."""

    keeps = True

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def on_insert(self, key: ExpertKey) -> None:
        self._order[key] = None

    def on_demand(self, key: ExpertKey) -> None:
        self._order.move_to_end(key)

    def on_drop(self, key: ExpertKey) -> None:
        self._order.pop(key, None)

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next((key for key in self._order if allowed(key)), None)


class Cold(LeastRecent):
    """Keeps nothing between cycles (the papers' setting); inside a cycle, should memory run out, least recent first."""

    keeps = False


class LeastFrequent:
    """Gives up what was demanded least often in the whole run, the least recent of these first.

    Counts outlive residency: an expert that comes back keeps its history, so a popular expert that was evicted once is
    not the first to go again.
    """

    keeps = True

    def __init__(self) -> None:
        self._demands: dict[ExpertKey, int] = {}
        self._rank: dict[ExpertKey, tuple[int, int]] = {}  # of present experts: (demands, last touch)
        # Every present expert at least once, perhaps under an older rank, and some that have left: put right when they
        # come up. Ranks only grow, so nothing that should come up earlier is hidden.
        self._heap: list[tuple[tuple[int, int], ExpertKey]] = []
        self._touch = 0

    def on_insert(self, key: ExpertKey) -> None:
        self._touch += 1
        self._rank[key] = (self._demands.get(key, 0), self._touch)
        heapq.heappush(self._heap, (self._rank[key], key))
        if len(self._heap) > 2 * len(self._rank) + 64:
            self._heap = [(rank, present) for present, rank in self._rank.items()]
            heapq.heapify(self._heap)

    def on_demand(self, key: ExpertKey) -> None:
        self._touch += 1
        self._demands[key] = count = self._demands.get(key, 0) + 1
        self._rank[key] = (count, self._touch)

    def on_drop(self, key: ExpertKey) -> None:
        self._rank.pop(key, None)

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        refused = []
        found = None
        while self._heap:
            rank, key = self._heap[0]
            now = self._rank.get(key)
            if now is None:
                heapq.heappop(self._heap)
            elif rank < now:
                heapq.heapreplace(self._heap, (now, key))
            elif allowed(key):
                found = key
                break
            else:
                refused.append(heapq.heappop(self._heap))
        for item in refused:
            heapq.heappush(self._heap, item)
        return found


POLICIES: dict[str, Callable[[], CachePolicy]] = {"none": Cold, "lru": LeastRecent, "lfu": LeastFrequent}


def make_policy(name: str) -> CachePolicy:
    """A new policy by its recipe name.

    Raises:
        MoexpError: there is no such policy.
    """
    if name not in POLICIES:
        raise MoexpError(f"unknown cache policy {name!r}", where="store.policy", valid=", ".join(POLICIES))
    return POLICIES[name]()
