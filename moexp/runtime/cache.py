"""Which expert to give up when memory is full: small objects without I/O, shared by the stores and the simulator."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from moexp.errors import MoexpError

if TYPE_CHECKING:  # the simulator runs this without torch
    from moexp.target.experts import ExpertKey


class CachePolicy(Protocol):
    """Orders the experts that are in memory or on their way.

    `keeps`: whether experts stay from one decoding cycle to the next. `spares_cycle`: whether a demand is to give up
    experts of its own cycle only when nothing else is left (so all but one that knows the future). `on_insert` is told
    of every expert that starts to come in, `on_demand` of every demand (for a miss: after `on_insert`), `on_drop` of
    every expert that leaves. `victim` names the first expert, in the policy's order, that `allowed` accepts; it does
    not drop it.
    """

    keeps: bool
    spares_cycle: bool

    def on_insert(self, key: ExpertKey) -> None: ...

    def on_demand(self, key: ExpertKey) -> None: ...

    def on_drop(self, key: ExpertKey) -> None: ...

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None: ...


class LeastRecent:
    """Gives up what was demanded (or came in) longest ago."""

    keeps = True
    spares_cycle = True

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def on_insert(self, key: ExpertKey) -> None:
        self._order[key] = None

    def on_demand(self, key: ExpertKey) -> None:
        self._order.move_to_end(key)

    def on_drop(self, key: ExpertKey) -> None:
        self._order.pop(key, None)

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        for key in self._order:
            if allowed(key):
                return key
        return None


class Cold(LeastRecent):
    """Keeps nothing between cycles (the papers' setting); inside a cycle, should memory run out, least recent first."""

    keeps = False


class LeastFrequent:
    """Gives up what was demanded least often in the whole run, the least recent of these first.

    Counts outlive residency: an expert that comes back keeps its history, so a popular expert that was evicted once is
    not the first to go again.
    """

    keeps = True
    spares_cycle = True

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


class LeastStale:
    """Gives up what will not be needed for longest if layers are walked in order, pass after pass (arXiv 2602.03921).

    A pass is one walk through the layers; it begins where a demand is of an earlier layer than the one before, or of
    an expert that the pass has demanded already. First go experts that the present pass has not used ("stale") in
    layers that it is through with, then stale ones in layers ahead, last those of the present pass. Of each group goes
    what was used in the oldest pass; within a pass, the first layer of those passed, the last of those ahead. The paper
    leaves open what holds for predicted experts: here they count as used in the pass that predicted them.
    """

    keeps = True
    spares_cycle = True

    def __init__(self) -> None:
        self._pass = 0
        self._layer = -1  # that was demanded last
        self._demanded: set[ExpertKey] = set()  # in the present pass
        self._last: dict[ExpertKey, int] = {}  # of present experts: pass of the last use
        self._by_layer: dict[int, OrderedDict[ExpertKey, None]] = {}  # by last use, so by last pass too

    def on_insert(self, key: ExpertKey) -> None:
        self._last[key] = self._pass
        self._by_layer.setdefault(key[0], OrderedDict())[key] = None

    def on_demand(self, key: ExpertKey) -> None:
        if key[0] < self._layer or key in self._demanded:
            self._pass += 1
            self._demanded.clear()
        self._layer = key[0]
        self._demanded.add(key)
        self._last[key] = self._pass
        self._by_layer[key[0]].move_to_end(key)

    def on_drop(self, key: ExpertKey) -> None:
        if self._last.pop(key, None) is not None:
            del self._by_layer[key[0]][key]

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        # Within a layer they stand by rank already, so the layers are merged, and as few as possible are asked for.
        # Most often the very first will do, and it is in a layer that was passed.
        first = self._stalest_passed()
        if first is not None and allowed(first):
            return first
        waiting = [iter(keys) for keys in self._by_layer.values() if keys]
        firsts = [(*self._rank(key), key, place) for place, keys in enumerate(waiting) for key in islice(keys, 1)]
        heapq.heapify(firsts)
        while firsts:
            *_, key, place = firsts[0]
            if allowed(key):
                return key
            following = next(waiting[place], None)
            if following is None:
                heapq.heappop(firsts)
            else:
                heapq.heapreplace(firsts, (*self._rank(following), following, place))
        return None

    def _stalest_passed(self) -> ExpertKey | None:
        found, oldest, of_layer = None, self._pass, -1
        for layer, keys in self._by_layer.items():
            if layer <= self._layer and keys:
                key = next(iter(keys))
                last = self._last[key]
                if last < oldest or (last == oldest and layer < of_layer):
                    found, oldest, of_layer = key, last, layer
        return found

    def _rank(self, key: ExpertKey) -> tuple[bool, bool, int, int]:
        layer, last = key[0], self._last[key]
        ahead = layer > self._layer
        return last == self._pass, ahead, last, -layer if ahead else layer


class StaticHot:
    """Gives up what was demanded least in a histogram that never changes: the most demanded experts stay for good.

    Args:
        demands: how often each expert was demanded, in any unit; experts that it lacks go first.
    """

    keeps = True
    spares_cycle = True

    def __init__(self, demands: Mapping[ExpertKey, float]) -> None:
        self._demands = demands
        self._present: list[tuple[float, ExpertKey]] = []  # sorted

    def on_insert(self, key: ExpertKey) -> None:
        insort(self._present, (self._demands.get(key, 0), key))

    def on_demand(self, key: ExpertKey) -> None:
        pass

    def on_drop(self, key: ExpertKey) -> None:
        item = (self._demands.get(key, 0), key)
        place = bisect_left(self._present, item)
        if self._present[place : place + 1] == [item]:
            del self._present[place]

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next((key for _, key in self._present if allowed(key)), None)


STATIC_HOT = "static-hot"  # the one policy that has to be given something
POLICIES: dict[str, Callable[[Mapping[ExpertKey, float]], CachePolicy]] = {
    "none": lambda demands: Cold(),
    "lru": lambda demands: LeastRecent(),
    "lfu": lambda demands: LeastFrequent(),
    "least-stale": lambda demands: LeastStale(),
    STATIC_HOT: StaticHot,
}


def make_policy(name: str, demands: Mapping[ExpertKey, float] | None = None) -> CachePolicy:
    """A new policy by its recipe name.

    Args:
        demands: how often each expert was demanded, for "static-hot".

    Raises:
        MoexpError: there is no such policy, or it lacks its histogram.
    """
    if name not in POLICIES:
        raise MoexpError(f"unknown cache policy {name!r}", where="store.policy", valid=", ".join(POLICIES))
    if name == STATIC_HOT and demands is None:
        raise MoexpError(f"{name} without a histogram", where="store.policy", valid="one from a routing trace")
    return POLICIES[name](demands or {})
