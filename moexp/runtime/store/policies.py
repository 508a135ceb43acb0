"""Which expert to give up when memory is full: small objects without I/O, shared by the stores and the simulator."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from moexp.base.errors import MoexpError

if TYPE_CHECKING:  # the simulator runs this without torch
    from moexp.target.experts import ExpertKey


class CachePolicy(Protocol):
    """Orders the experts that are in memory or on their way.

    `keeps`: whether experts stay from one decoding cycle to the next. `spares_cycle`: whether a demand is to give up
    experts of its own cycle only when nothing else is left (so all but one that knows the future). `on_insert` is told
    of every expert that starts to come in, `on_demand` of every demand (for a miss: after `on_insert`), `on_drop` of
    every expert that leaves; `begin_cycle` of every cycle. `victim` names the first expert, in the policy's order, that
    `allowed` accepts; it does not drop it. `resting`: of the experts that came in or were demanded in this cycle,
    `allowed` accepts none, so that a policy need not ask for them.
    """

    keeps: bool
    spares_cycle: bool

    def on_insert(self, key: ExpertKey) -> None: ...

    def on_demand(self, key: ExpertKey) -> None: ...

    def on_drop(self, key: ExpertKey) -> None: ...

    def begin_cycle(self) -> None: ...

    def victim(self, allowed: Callable[[ExpertKey], bool], resting: bool = False) -> ExpertKey | None: ...


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

    def begin_cycle(self) -> None:
        pass

    def victim(self, allowed: Callable[[ExpertKey], bool], resting: bool = False) -> ExpertKey | None:
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
        # Present experts, in the order of their last touch: those of this cycle, and the others by their demands. What
        # is touched in a cycle is touched again and again, and is not to be given up: it is put in its place later.
        self._active: OrderedDict[ExpertKey, None] = OrderedDict()
        self._resting: dict[int, dict[ExpertKey, None]] = {}
        self._counts: list[int] = []  # heap of the keys of `_resting`

    def on_insert(self, key: ExpertKey) -> None:
        self._active[key] = None

    def on_demand(self, key: ExpertKey) -> None:
        count = self._demands.get(key, 0)
        self._demands[key] = count + 1
        if key in self._active:
            self._active.move_to_end(key)
        else:
            del self._resting[count][key]
            self._active[key] = None

    def on_drop(self, key: ExpertKey) -> None:
        if key in self._active:
            del self._active[key]
        else:
            self._resting.get(self._demands.get(key, 0), {}).pop(key, None)

    def begin_cycle(self) -> None:
        resting, demands = self._resting, self._demands
        for key in self._active:
            count = demands.get(key, 0)
            group = resting.get(count)
            if group is None:
                group = resting[count] = {}
                heapq.heappush(self._counts, count)
            group[key] = None
        self._active.clear()

    def victim(self, allowed: Callable[[ExpertKey], bool], resting: bool = False) -> ExpertKey | None:
        if not resting:
            self.begin_cycle()  # each touch is later than all that rests, so this is their place at any time
        counts = self._counts
        while counts and not self._resting[counts[0]]:
            del self._resting[heapq.heappop(counts)]
        if not counts:
            return None
        for key in self._resting[counts[0]]:
            if allowed(key):
                return key
        for count in sorted(counts)[1:]:
            for key in self._resting[count]:
                if allowed(key):
                    return key
        return None


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
        # Present experts in the order of their last use (so by last pass too): those of this cycle, and the others by
        # layer. The former are put in their place later, as in `LeastFrequent`.
        self._active: OrderedDict[ExpertKey, None] = OrderedDict()
        self._by_layer: dict[int, OrderedDict[ExpertKey, None]] = {}
        # Of layers that were passed, (last pass of the first resting expert, layer), perhaps an earlier pass than now:
        # put right when it comes up. Their experts are used later and later, so nothing is hidden.
        self._passed: list[tuple[int, int]] = []

    def on_insert(self, key: ExpertKey) -> None:
        self._last[key] = self._pass
        self._active[key] = None

    def on_demand(self, key: ExpertKey) -> None:
        layer = key[0]
        if layer < self._layer or key in self._demanded:
            self._pass += 1
            self._demanded.clear()
            self._passed.clear()
            self._go_on(-1, layer)
        elif layer > self._layer:
            self._go_on(self._layer, layer)
        self._layer = layer
        self._demanded.add(key)
        self._last[key] = self._pass
        if key in self._active:
            self._active.move_to_end(key)
        else:
            del self._by_layer[layer][key]
            self._active[key] = None

    def on_drop(self, key: ExpertKey) -> None:
        if self._last.pop(key, None) is not None:
            if key in self._active:
                del self._active[key]
            else:
                del self._by_layer[key[0]][key]

    def begin_cycle(self) -> None:
        by_layer, last = self._by_layer, self._last
        for key in self._active:
            layer = key[0]
            keys = by_layer.get(layer)
            if keys is None:
                keys = by_layer[layer] = OrderedDict()
            if not keys and layer <= self._layer:
                heapq.heappush(self._passed, (last[key], layer))
            keys[key] = None
        self._active.clear()

    def victim(self, allowed: Callable[[ExpertKey], bool], resting: bool = False) -> ExpertKey | None:
        if not resting:
            self.begin_cycle()
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

    def _go_on(self, before: int, layer: int) -> None:
        """Layers behind `before`, up to `layer`, are passed now."""
        for number, keys in self._by_layer.items():
            if before < number <= layer and keys:
                heapq.heappush(self._passed, (self._last[next(iter(keys))], number))

    def _stalest_passed(self) -> ExpertKey | None:
        passed = self._passed
        while passed:
            found, layer = passed[0]
            keys = self._by_layer[layer]
            if not keys:
                heapq.heappop(passed)
                continue
            key = next(iter(keys))
            last = self._last[key]
            if last != found:
                heapq.heapreplace(passed, (last, layer))
            else:
                return key if last < self._pass else None
        return None

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

    def begin_cycle(self) -> None:
        pass

    def victim(self, allowed: Callable[[ExpertKey], bool], resting: bool = False) -> ExpertKey | None:
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
