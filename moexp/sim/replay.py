"""A recorded run walked again under the virtual clock, and held against what was measured.

Everything that the run asked of its store is asked again, in the same order: warm-up, prefill and all methods that took
turns. Where nothing depends on when a transfer begins or lands, the counters `EXACT` are the measured ones, cycle by
cycle: that is so on stores that keep nothing and on stores without prefetch. A prefetch that nobody demanded is
cancelled or lands late depending on time, and so whether a cache that keeps holds it; and one that has begun when its
cycle ends outlives it. How covered demands split into hits and late ones, and what was cancelled, always depends on
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from moexp.records import StepRecord
from moexp.runtime.recording.files import RecordedCycle, Recording
from moexp.runtime.store.counters import StoreCounters
from moexp.sim.cold import open_machine
from moexp.sim.machine import CycleTimes, MachineModel
from moexp.sim.simulate import cache_policy, no_collection
from moexp.sim.walk import key_table, make_cycle

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey

EXACT = ("demanded", "covered", "missed", "prefetched", "used", "wasted")
"""Counters that do not depend on time (see above)."""

Cycles = dict[tuple[int, str, int], CycleTimes]
"""By request, method and number of the cycle."""


@dataclass
class Comparison:
    """One method's run against its replay, over the cycles that both have.

    Attributes:
        measured_s, simulated_s: of all cycles together.
        counts: counter -> (measured, simulated).
        differing: cycles in which a counter of `EXACT` is another, by counter.
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
    found: Cycles = {}
    for _, session in groupby(recording.cycles, lambda cycle: cycle.session):
        recorded = list(session)
        cycles = [make_cycle(table, one) for one in recorded]
        policy = cache_policy(info.store["policy"], cycles, demands)
        machine, begin = open_machine(model, policy, cycles), 0
        times: list[CycleTimes] = []
        for (request, method), mine in groupby(recorded, lambda one: (one.request, one.method)):
            if prices is not None and request >= 0:
                machine.reprice(prices(request, method))
            machine.settle()
            end = begin + len(list(mine))
            with no_collection():
                times += machine.run_timed(cycles[begin:end])
            begin = end
        for one, took in zip(recorded, times, strict=True):
            if one.request >= 0 and one.cycle >= 0:
                found[one.request, one.method, one.cycle] = took
    return found


def compare(steps: Iterable[StepRecord], replayed: Cycles) -> list[Comparison]:
    """Measured cycles against replayed ones, method by method; cycles without counters count for time only."""
    found: dict[str, Comparison] = {}
    for step in steps:
        took = replayed.get((step.request, step.method, step.cycle))
        if took is None:
            continue
        one = found.setdefault(step.method, Comparison(step.method))
        one.cycles += 1
        one.tokens += step.emitted
        one.measured_s += step.cycle_s
        one.simulated_s += took.cycle_s
        one.measured_draft_s += step.draft_s
        one.simulated_draft_s += took.draft_s
        if step.store:
            _count(one, measured_counts(step), simulated_counts(took.store))
    return list(found.values())


def measured_counts(step: StepRecord) -> dict[str, int]:
    """A record's counters, with `covered`: demands that were in memory or on their way."""
    counts = {name: int(value) for name, value in step.store.items() if not name.endswith("_s")}
    return counts | {"covered": counts["hit"] + counts["late"]}


def simulated_counts(counters: StoreCounters) -> dict[str, int]:
    """The same of a replayed cycle."""
    counts = {name: int(value) for name, value in counters.as_dict().items() if not name.endswith("_s")}
    return counts | {"covered": counts["hit"] + counts["late"]}


def _count(one: Comparison, measured: dict[str, int], simulated: dict[str, int]) -> None:
    for name in (*EXACT, "hit", "late", "cancelled", "evicted", "read_bytes"):
        before = one.counts.get(name, (0, 0))
        one.counts[name] = (before[0] + measured[name], before[1] + simulated[name])
        if name in EXACT and measured[name] != simulated[name]:
            one.differing[name] = one.differing.get(name, 0) + 1


def recorded_by_key(recording: Recording) -> dict[tuple[int, str, int], RecordedCycle]:
    """Decoding cycles by request, method and number."""
    return {(one.request, one.method, one.cycle): one for one in recording.cycles if one.request >= 0 <= one.cycle}


def whole(steps: Sequence[StepRecord], recording: Recording) -> bool:
    """Whether a recording has all of these cycles."""
    there = recorded_by_key(recording)
    return all((step.request, step.method, step.cycle) in there for step in steps)
