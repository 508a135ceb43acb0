"""A shortcut for a cold cache without prefetch: exactly what the walk over a store does, by counting misses.

Nothing stays between cycles, and every layer waits for all that it demands. So a layer finds the link idle, and its
time follows from how many experts it misses, has already, and computes. A test compares it with the full walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moexp.runtime.store.counters import StoreCounters
from moexp.sim.machine.costs import StepCosts
from moexp.sim.machine.cycles import Step
from moexp.sim.machine.link import Flight, LinkModel, VirtualLink

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey


class ColdLayers:
    """Steps over an unlimited store that keeps nothing.

    Args:
        link: how transfers take their time.
        expert_bytes: of each transfer.
        counters: where steps are counted.
    """

    def __init__(self, link: LinkModel, expert_bytes: int, counters: StoreCounters) -> None:
        self._link, self._bytes, self._counters = link, expert_bytes, counters
        self._drafted: set[ExpertKey] = set()  # experts that the cycle's drafting left in memory
        self._layers: dict[StepCosts, dict[tuple[int, int, int], tuple[float, float]]] = {}
        self._bursts: dict[int, list[float]] = {}

    def begin_cycle(self, now_s: float) -> None:
        """Nothing stays."""
        self._drafted.clear()

    def reprice(self, link: LinkModel) -> None:
        """From now on transfers take as long as another model says."""
        self._link = link
        self._layers.clear()
        self._bursts.clear()

    def step(self, step: Step, costs: StepCosts) -> tuple[float, float]:
        """Seconds of a step, and of these, seconds of waiting."""
        layers, drafted = self._layers.setdefault(costs, {}), self._drafted
        chosen, drafting = step.chosen, step.phase == "draft"
        seconds, stall_s, demanded, missed = costs.before_s, 0.0, 0, 0
        for keys in step.demands:
            union = len(keys)
            absent = union - len(drafted.intersection(keys)) if drafted else union
            times = layers.get((union, absent, chosen))
            if times is None:
                times = layers[union, absent, chosen] = self._layer(costs, union, absent, chosen)
            seconds += times[0]
            stall_s += times[1]
            demanded += union
            missed += absent
            if drafting:
                drafted.update(keys)
            elif drafted:
                drafted.difference_update(keys)
        moved = missed * self._bytes
        for counts in (self._counters, self._counters.phases[step.phase]):
            counts.demanded += demanded
            counts.missed += missed
            counts.hit += demanded - missed
            counts.demand_bytes += moved
            counts.stall_s += stall_s
        self._counters.read_bytes += moved
        return seconds, stall_s

    def _layer(self, costs: StepCosts, union: int, absent: int, chosen: int) -> tuple[float, float]:
        """Seconds of a layer, and of these, seconds of waiting."""
        expert_s = costs.union_s(union, chosen)
        time_s = costs.lead_s + absent * costs.launch_s + costs.resident_s + (union - absent) * expert_s
        stall_s = 0.0
        for after_s in self._burst(absent):
            landed_s = costs.lead_s + after_s
            stall_s += max(0.0, landed_s - time_s)
            time_s = max(time_s, landed_s) + expert_s
        return time_s, stall_s

    def _burst(self, count: int) -> list[float]:
        """When transfers that start together on an idle link land, after their start."""
        if count not in self._bursts:
            link, times = VirtualLink(self._link, self._bytes), list[float]()
            link.start([Flight(None, 0) for _ in range(count)], True)
            while len(times) < count:
                link.wait()
                times += [link.now_s] * len(link.landed)
                link.landed.clear()
            self._bursts[count] = times
        return self._bursts[count]
