"""A virtual machine that decodes: it walks steps through the layers in the order of `MoELayer`.

Of each layer: attention and router, the demand, the prefetch of what is beyond it, the resident compute, then the
experts, those in memory first and the others as they arrive; then the release.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moexp.runtime.store.counters import StoreCounters
from moexp.runtime.store.policies import CachePolicy
from moexp.sim.machine.cold import ColdLayers
from moexp.sim.machine.costs import ComputeCosts, StepCosts
from moexp.sim.machine.cycles import Announcement, Cycle, Step
from moexp.sim.machine.link import LinkModel
from moexp.sim.machine.store import VirtualStore


@dataclass(frozen=True)
class MachineModel:
    """What is simulated.

    Attributes:
        link, costs: transfers and computing.
        expert_bytes: moved for each expert.
        capacity: experts in memory and on their way; None: no limit.
    """

    link: LinkModel
    costs: ComputeCosts
    expert_bytes: int
    capacity: int | None = None


@dataclass(frozen=True)
class CycleTimes:
    """Of one cycle: seconds of drafting (steps, prefetches), seconds of the step that ends it, and its counters."""

    draft_s: float
    verify_s: float
    store: StoreCounters

    @property
    def cycle_s(self) -> float:
        """Seconds of the cycle."""
        return self.draft_s + self.verify_s


class Machine:
    """Decodes cycle after cycle.

    Args:
        model: what is simulated.
        policy: what stays between cycles, of this machine alone; None: a cold cache of any size, and no prefetch.

    Attributes:
        now_s: the clock.
        compute_s: time spent computing, of all cycles.
    """

    def __init__(self, model: MachineModel, policy: CachePolicy | None) -> None:
        self.model = model
        self.now_s = 0.0
        self.compute_s = 0.0
        self._steps: dict[tuple[str, int, bool], StepCosts] = {}
        self._store: VirtualStore | ColdLayers
        if policy is None:
            self.counters = StoreCounters()
            self._store = ColdLayers(model.link, model.expert_bytes, self.counters)
        else:
            self._store = VirtualStore(policy, model.capacity, model.link, model.expert_bytes)
            self.counters = self._store.counters

    def run(self, cycles: Iterable[Cycle]) -> None:
        """Decode cycles; only the totals are kept (`now_s`, `compute_s`, `counters`)."""
        for cycle in cycles:
            self._cycle(cycle)

    def run_timed(self, cycles: Iterable[Cycle]) -> list[CycleTimes]:
        """Decode cycles, and time and count each of them."""
        times = []
        for cycle in cycles:
            before, begin_s = self.counters.snapshot(), self.now_s
            drafted_s = self._cycle(cycle)
            times.append(CycleTimes(drafted_s - begin_s, self.now_s - drafted_s, self.counters - before))
        return times

    def reprice(self, model: MachineModel) -> None:
        """From now on everything costs what another model says; slots and sizes are the same."""
        self.model = model
        self._steps.clear()
        self._store.reprice(model.link)

    def settle(self) -> None:
        """Between two requests: what is on its way lands, and nothing of the one is done in the other's time."""
        if isinstance(self._store, VirtualStore):
            self.now_s = self._store.settle(self.now_s)

    def close(self) -> None:
        """End the run: whatever was prefetched and not used is wasted now."""
        if isinstance(self._store, VirtualStore):
            self._store.close(self.now_s)

    def _cycle(self, cycle: Cycle) -> float:
        """One cycle; the time at which its last step began."""
        store, last_s = self._store, self.now_s
        store.begin_cycle(self.now_s)
        for event in cycle.events:
            last_s = self.now_s
            if isinstance(store, ColdLayers):
                assert isinstance(event, Step)
                seconds, stall_s = store.step(event, self._costs(event))
                self.now_s += seconds
                self.compute_s += seconds - stall_s
            elif isinstance(event, Announcement):
                self.now_s += store.prefetch(event.keys, self.now_s) * self.model.costs.launch_s
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
        for layer, keys in enumerate(step.demands):
            now_s += lead_s
            ticket = request(keys, phase, now_s)
            if launch_s:
                now_s += ticket.left * launch_s
            if beyond is not None:
                launched = store.prefetch(beyond[layer], now_s)
                now_s += launched * launch_s
            now_s += resident_s
            expert_s = flat_s if flat_s is not None else costs.union_s(len(keys), step.chosen)
            while True:
                now_s += ticket.ready * expert_s
                ticket.ready = 0
                if not ticket.left:
                    break
                landed_s = wait(ticket, now_s)
                idle_s += landed_s - now_s
                now_s = landed_s
            store.release(ticket)
        self.compute_s += now_s - self.now_s - idle_s
        self.now_s = now_s

    def _costs(self, step: Step) -> StepCosts:
        kind = (step.phase, step.rows, step.draft_experts)
        costs = self._steps.get(kind)
        if costs is None:
            costs = self._steps[kind] = self.model.costs.step(*kind)
        return costs


def open_machine(model: MachineModel, policy: CachePolicy, cycles: Sequence[Cycle]) -> Machine:
    """A machine for these cycles: it counts instead of walking a store where that gives the same."""
    plain = all(isinstance(event, Step) and event.beyond is None for cycle in cycles for event in cycle.events)
    return Machine(model, None if plain and not policy.keeps and model.capacity is None else policy)
