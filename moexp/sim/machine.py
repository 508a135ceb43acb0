"""A virtual machine that decodes: it walks steps through the layers in the order of `MoELayer`.

Of each layer: attention and router, the demand, the prefetch of what is beyond it, the resident compute, then the
experts, those in memory first and the others as they arrive; then the release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from moexp.runtime.store.counters import StoreCounters
from moexp.runtime.store.policies import CachePolicy
from moexp.sim.costs import ComputeCosts, StepCosts
from moexp.sim.link import LinkModel
from moexp.sim.store import VirtualStore
from moexp.sim.walk import Announcement, Cycle, Step


@dataclass(frozen=True)
class MachineModel:
    """What is simulated.

    Attributes:
        link, costs: transfers and computing.
        expert_bytes: moved for each expert.
        capacity: experts in memory and on their way; None: no limit.
        resident: every expert is in memory from the start; nothing moves.
    """

    link: LinkModel
    costs: ComputeCosts
    expert_bytes: int
    capacity: int | None = None
    resident: bool = False


@dataclass(frozen=True)
class CycleTimes:
    """What a cycle took: drafting (steps, prefetches), then the step that ends it. `store`: counted since the last."""

    draft_s: float
    verify_s: float
    emitted: int
    store: StoreCounters

    @property
    def cycle_s(self) -> float:
        """All of it."""
        return self.draft_s + self.verify_s


class Machine:
    """Decodes cycle after cycle on one store.

    Args:
        model: what is simulated.
        policy: what stays between cycles; not shared with another machine.

    Attributes:
        now_s: the clock.
        compute_s: time spent computing, of all cycles.
    """

    def __init__(self, model: MachineModel, policy: CachePolicy) -> None:
        self.model = model
        self.now_s = 0.0
        self.compute_s = 0.0
        self.counters = StoreCounters()
        self._store: VirtualStore | None = None
        if not model.resident:
            self._store = VirtualStore(policy, model.capacity, model.link, model.expert_bytes)
            self.counters = self._store.counters
        self._steps: dict[tuple[str, int, bool], StepCosts] = {}

    def run(self, cycles: Iterable[Cycle]) -> None:
        """Decode cycles; only the totals are kept (`now_s`, `counters`)."""
        for cycle in cycles:
            self._cycle(cycle)

    def run_timed(self, cycles: Iterable[Cycle]) -> list[CycleTimes]:
        """Decode cycles, and say what each of them took and counted."""
        return time_cycles(self, self._cycle, cycles)

    def reprice(self, model: MachineModel) -> None:
        """From now on everything costs what another model says; slots and sizes are the same."""
        self.model = model
        self._steps.clear()
        if self._store is not None:
            self._store.link.reprice(model.link)

    def settle(self) -> None:
        """Between two requests: what is on its way lands, and nothing of the one is done in the other's time."""
        if self._store is not None:
            self.now_s = self._store.settle(self.now_s)

    def close(self) -> None:
        """End the run: whatever was prefetched and not used is wasted now."""
        if self._store is not None:
            self._store.close(self.now_s)

    def _cycle(self, cycle: Cycle) -> float:
        """One cycle; the time at which its last step began."""
        store, last_s = self._store, self.now_s
        if store is not None:
            store.begin_cycle(self.now_s)
        for event in cycle.events:
            last_s = self.now_s
            if isinstance(event, Announcement):
                launched = store.prefetch(event.keys, self.now_s) if store is not None else 0
                self.now_s += launched * self.model.costs.launch_s
            elif store is None:
                self._resident(event)
            else:
                self._step(event, store)
        return last_s

    def _step(self, step: Step, store: VirtualStore) -> None:
        costs = self._costs(step)
        now_s, idle_s = self.now_s + costs.before_s, 0.0
        lead_s, resident_s, launch_s, phase = costs.lead_s, costs.resident_s, costs.launch_s, step.phase
        request, wait = store.request, store.wait
        flat_s = costs.expert_s if not costs.expert_row_s else None
        beyond = step.beyond
        for place, keys in enumerate(step.demands):
            now_s += lead_s
            ticket = request(keys, phase, now_s)
            if launch_s:
                now_s += ticket.left * launch_s
            if beyond is not None:
                launched = store.prefetch(beyond[place], now_s)
                now_s += launched * launch_s
            now_s += resident_s
            expert_s = flat_s if flat_s is not None else costs.union_s(len(keys), step.chosen)
            while True:
                now_s += ticket.ready * expert_s
                ticket.ready = 0
                if not ticket.left:
                    break
                there_s = wait(ticket, now_s)
                idle_s += there_s - now_s
                now_s = there_s
            store.release(ticket)
        now_s += costs.after_s
        self.compute_s += now_s - self.now_s - idle_s
        self.now_s = now_s

    def _resident(self, step: Step) -> None:
        costs, begin_s = self._costs(step), self.now_s
        self.now_s += costs.before_s + costs.after_s + len(step.demands) * (costs.lead_s + costs.resident_s)
        for keys in step.demands:
            self.now_s += len(keys) * costs.union_s(len(keys), step.chosen)
            for counts in (self.counters, self.counters.phases[step.phase]):
                counts.demanded += len(keys)
                counts.hit += len(keys)
        self.compute_s += self.now_s - begin_s

    def _costs(self, step: Step) -> StepCosts:
        which = (step.phase, step.rows, step.draft_experts)
        costs = self._steps.get(which)
        if costs is None:
            costs = self._steps[which] = self.model.costs.step(*which)
        return costs


PolicyMaker = Callable[[], CachePolicy]
"""A new policy for each machine."""


class Clocked(Protocol):
    """A machine's clock and counters."""

    now_s: float
    counters: StoreCounters


def time_cycles(machine: Clocked, run: Callable[[Cycle], float], cycles: Iterable[Cycle]) -> list[CycleTimes]:
    """What each cycle took and counted.

    Args:
        run: decodes a cycle on the machine and gives the time at which its last step began.
    """
    found = []
    for cycle in cycles:
        before, begin_s = machine.counters.snapshot(), machine.now_s
        drafted_s = run(cycle)
        counted = machine.counters - before
        found.append(CycleTimes(drafted_s - begin_s, machine.now_s - drafted_s, cycle.emitted, counted))
    return found
