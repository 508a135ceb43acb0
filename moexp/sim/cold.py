"""A shortcut for a cold cache without prefetch: exactly what `Machine` does, by counting what each layer misses.

Nothing stays between cycles, and every layer waits for all that it demands: so it finds the link idle, and its time
follows from how many experts it misses, has already, and computes. A test compares it with the full walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moexp.runtime.store.counters import StoreCounters
from moexp.runtime.store.policies import CachePolicy
from moexp.sim.costs import StepCosts
from moexp.sim.link import Flight, VirtualLink
from moexp.sim.machine import CycleTimes, Machine, MachineModel, time_cycles
from moexp.sim.walk import Cycle, Step

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey


def open_machine(model: MachineModel, policy: CachePolicy, cycles: Sequence[Cycle]) -> Machine | ColdMachine:
    """A machine for these cycles: the shortcut where it applies."""
    plain = all(isinstance(event, Step) and event.beyond is None for cycle in cycles for event in cycle.events)
    if plain and not policy.keeps and model.capacity is None and not model.resident:
        return ColdMachine(model)
    return Machine(model, policy)


class ColdMachine:
    """`Machine` without prefetches on an unlimited store that keeps nothing; same attributes and methods."""

    def __init__(self, model: MachineModel) -> None:
        self.model = model
        self.now_s = 0.0
        self.compute_s = 0.0
        self.counters = StoreCounters()
        self._steps: dict[tuple[str, int, bool], StepCosts] = {}
        self._layers: dict[tuple[str, int, bool, int, int, int], tuple[float, float]] = {}
        self._bursts: dict[int, list[float]] = {}

    def run(self, cycles: Iterable[Cycle]) -> None:
        """See `Machine`."""
        for cycle in cycles:
            self._cycle(cycle)

    def run_timed(self, cycles: Iterable[Cycle]) -> list[CycleTimes]:
        """See `Machine`."""
        return time_cycles(self, self._cycle, cycles)

    def settle(self) -> None:
        """See `Machine`: nothing is on its way between two cycles."""

    def reprice(self, model: MachineModel) -> None:
        """See `Machine`."""
        self.model = model
        self._steps.clear()
        self._layers.clear()
        self._bursts.clear()

    def close(self) -> None:
        """See `Machine`."""

    def _cycle(self, cycle: Cycle) -> float:
        seen: set[ExpertKey] = set()
        last_s = self.now_s
        for step in cycle.events:
            assert isinstance(step, Step)
            last_s = self.now_s
            self._step(step, seen)
        return last_s

    def _step(self, step: Step, seen: set[ExpertKey]) -> None:
        which = (step.phase, step.rows, step.draft_experts)
        costs = self._steps.get(which)
        if costs is None:
            costs = self._steps[which] = self.model.costs.step(*which)
        layers, chosen, drafting = self._layers, step.chosen, step.phase == "draft"
        seconds, stall_s, demanded, missed = costs.before_s + costs.after_s, 0.0, 0, 0
        for keys in step.demands:
            union = len(keys)
            absent = union - len(seen.intersection(keys)) if seen else union
            found = layers.get((*which, union, absent, chosen))
            if found is None:
                found = layers[(*which, union, absent, chosen)] = self._layer(costs, union, absent, chosen)
            seconds += found[0]
            stall_s += found[1]
            demanded += union
            missed += absent
            if drafting:
                seen.update(keys)
            elif seen:
                seen.difference_update(keys)
        moved = missed * self.model.expert_bytes
        for counts in (self.counters, self.counters.phases[step.phase]):
            counts.demanded += demanded
            counts.missed += missed
            counts.hit += demanded - missed
            counts.demand_bytes += moved
            counts.stall_s += stall_s
        self.counters.read_bytes += moved
        self.now_s += seconds
        self.compute_s += seconds - stall_s

    def _layer(self, costs: StepCosts, union: int, absent: int, chosen: int) -> tuple[float, float]:
        """Seconds of a layer, and of these, seconds of waiting."""
        expert_s = costs.union_s(union, chosen)
        time_s = costs.lead_s + absent * costs.launch_s + costs.resident_s + (union - absent) * expert_s
        stall_s = 0.0
        for after_s in self._burst(absent):
            there_s = costs.lead_s + after_s
            stall_s += max(0.0, there_s - time_s)
            time_s = max(time_s, there_s) + expert_s
        return time_s, stall_s

    def _burst(self, count: int) -> list[float]:
        """When transfers that start together on an idle link land, after their start."""
        if count not in self._bursts:
            link, times = VirtualLink(self.model.link, self.model.expert_bytes), list[float]()
            link.start([Flight(None, 0) for _ in range(count)], True)
            while len(times) < count:
                link.wait()
                times += [link.now_s] * len(link.landed)
                link.landed.clear()
            self._bursts[count] = times
        return self._bursts[count]
