"""Which expert to give up when memory is full: small objects without I/O, shared by the stores and the simulator."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from moexp.base.errors import MoexpError

if TYPE_CHECKING:  # the simulator runs this without torch
    from moexp.target.experts import ExpertKey


class CachePolicy(Protocol):
    """Orders the experts that are in memory or on their way.

    Attributes:
        keeps: whether experts stay from one decoding cycle to the next.
        spares_cycle: whether a demand gives up experts of its own cycle only when nothing else is left (so all but one
            that knows the future).
    """

    keeps: bool
    spares_cycle: bool

    def on_insert(self, key: ExpertKey) -> None:
        """An expert starts to come in."""

    def on_demand(self, key: ExpertKey) -> None:
        """An expert is demanded (for a miss: after `on_insert`)."""

    def on_drop(self, key: ExpertKey) -> None:
        """An expert leaves."""

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """The first expert, in the policy's order, that `allowed` accepts; it is not dropped here."""


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
    """Gives up what was demanded least often in the run, the least recent of these first.

    Counts outlive residency: an expert that comes back has its history, so a popular expert that was evicted once is
    not the first to go again.
    """

    keeps = True
    spares_cycle = True

    def __init__(self) -> None:
        self._demands: dict[ExpertKey, int] = {}
        self._by_count: dict[int, dict[ExpertKey, None]] = {}  # present experts, in the order of their last touch

    def on_insert(self, key: ExpertKey) -> None:
        self._by_count.setdefault(self._demands.get(key, 0), {})[key] = None

    def on_demand(self, key: ExpertKey) -> None:
        self.on_drop(key)
        self._demands[key] = self._demands.get(key, 0) + 1
        self.on_insert(key)

    def on_drop(self, key: ExpertKey) -> None:
        count = self._demands.get(key, 0)
        group = self._by_count.get(count, {})
        group.pop(key, None)
        if not group:
            self._by_count.pop(count, None)

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next((key for count in sorted(self._by_count) for key in self._by_count[count] if allowed(key)), None)


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
        # By layer, present experts in the order of their last use, with its pass: so in the order of their rank too.
        self._last: dict[int, OrderedDict[ExpertKey, int]] = {}

    def on_insert(self, key: ExpertKey) -> None:
        self._last.setdefault(key[0], OrderedDict())[key] = self._pass

    def on_demand(self, key: ExpertKey) -> None:
        layer = key[0]
        if layer < self._layer or key in self._demanded:
            self._pass += 1
            self._demanded.clear()
        self._layer = layer
        self._demanded.add(key)
        used = self._last[layer]
        used[key] = self._pass
        used.move_to_end(key)

    def on_drop(self, key: ExpertKey) -> None:
        if key[0] in self._last:
            self._last[key[0]].pop(key, None)

    def victim(self, allowed: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        best, victim = None, None
        for layer, used in self._last.items():
            ahead = layer > self._layer
            for key, last in used.items():
                rank = (last == self._pass, ahead, last, -layer if ahead else layer)
                if best is not None and rank > best:
                    break
                if allowed(key):
                    best, victim = rank, key
                    break
        return victim


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
        index = bisect_left(self._present, item)
        if self._present[index : index + 1] == [item]:
            del self._present[index]

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
