"""A recorded run walked again under the virtual clock, and held against the measured one.

The store sees the run's requests again, in the same order: warm-up, prefill and all methods that took turns. Where
nothing depends on when a transfer begins or lands, the counters `EXACT` equal the measured ones, cycle by cycle: so on
stores that keep nothing and on stores without prefetch. With both, time decides whether a prefetch that is not demanded
is cancelled or lands, and so whether a cache keeps it; one that has begun when its cycle ends outlives it. How covered
demands split into hits and late ones, and what was cancelled, always depends on time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from moexp.records import StepRecord
from moexp.runtime.recording.files import Recording
from moexp.sim.machine.cycles import key_table, recorded_cycle
from moexp.sim.machine.machine import CycleTimes, MachineModel, open_machine
from moexp.sim.machine.policies import cache_policy
from moexp.sim.machine.run import no_collection

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey

EXACT = ("demanded", "covered", "missed", "prefetched", "used", "wasted")
"""Counters that do not depend on time (see above); `covered`: demands that were in memory or on their way."""
COUNTED = (*EXACT, "hit", "late", "cancelled", "read_bytes")

Cycles = dict[tuple[int, str, int], CycleTimes]
"""By request, method and number of the cycle."""


@dataclass
class Comparison:
    """One method's run against its replay, over the cycles that both have.

    Attributes:
        measured_s, simulated_s: of all cycles together.
        counts: counter -> (measured, simulated).
        differing: number of cycles in which a counter of `EXACT` differs, by counter.
    """

    method: str
    cycles: int = 0
    tokens: int = 0
    measured_s: float = 0.0
    simulated_s: float = 0.0
    measured_draft_s: float = 0.0
    simulated_draft_s: float = 0.0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)

    @property
    def time_error(self) -> float | None:
        """(simulated - measured) / measured."""
        return (self.simulated_s - self.measured_s) / self.measured_s if self.measured_s else None

    @property
    def counters_match(self) -> bool:
        """Whether every counter of `EXACT` is the same in every cycle."""
        return not self.differing

    @property
    def totals_match(self) -> bool:
        """Whether they are the same over all cycles."""
        return all(self.counts[name][0] == self.counts[name][1] for name in EXACT if name in self.counts)


def replay(
    recording: Recording,
    model: MachineModel,
    demands: Mapping[ExpertKey, float] | None = None,
    prices: Callable[[int, str], MachineModel] | None = None,
) -> Cycles:
    """Predicts every decoding cycle of a recorded run.

    Args:
        model: what is simulated; the cache policy is the recording's.
        demands: the histogram of "static-hot".
        prices: the machine as it was when a request was decoded by a method; None: always `model`.
    """
    info = recording.info
    table = key_table(info.geometry.layers, info.geometry.num_experts)
    predicted: Cycles = {}
    for _, session in groupby(recording.cycles, lambda cycle: cycle.session):
        recorded = list(session)
        cycles = [recorded_cycle(table, one) for one in recorded]
        policy = cache_policy(info.store["policy"], cycles, demands)
        machine = open_machine(model, policy, cycles)
        times: list[CycleTimes] = []
        for (request, method), turn in groupby(recorded, lambda one: (one.request, one.method)):
            if prices is not None and request >= 0:
                machine.reprice(prices(request, method))
            machine.settle()
            begin = len(times)
            with no_collection():
                times += machine.run_timed(cycles[begin : begin + len(list(turn))])
        for one, took in zip(recorded, times, strict=True):
            if one.request >= 0 and one.cycle >= 0:
                predicted[one.request, one.method, one.cycle] = took
    return predicted


def compare(steps: Iterable[StepRecord], replayed: Cycles) -> list[Comparison]:
    """Measured cycles against replayed ones, method by method; cycles without counters count for time only."""
    methods: dict[str, Comparison] = {}
    for step in steps:
        took = replayed.get((step.request, step.method, step.cycle))
        if took is None:
            continue
        one = methods.setdefault(step.method, Comparison(step.method))
        one.cycles += 1
        one.tokens += step.emitted
        one.measured_s += step.cycle_s
        one.simulated_s += took.cycle_s
        one.measured_draft_s += step.draft_s
        one.simulated_draft_s += took.draft_s
        simulated = took.store.as_dict()
        for name in COUNTED if step.store else ():
            counts = _count(step.store, name), _count(simulated, name)
            before = one.counts.get(name, (0, 0))
            one.counts[name] = (before[0] + counts[0], before[1] + counts[1])
            if name in EXACT and counts[0] != counts[1]:
                one.differing[name] = one.differing.get(name, 0) + 1
    return list(methods.values())


def _count(counters: Mapping[str, float], name: str) -> int:
    return int(counters["hit"] + counters["late"] if name == "covered" else counters[name])
