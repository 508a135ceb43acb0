"""One simulated run: cycles on a machine under a cache policy, and its totals."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moexp.metrics import Ratio
from moexp.runtime.store.counters import StoreCounters
from moexp.sim.machine.cycles import Cycle
from moexp.sim.machine.machine import MachineModel, open_machine
from moexp.sim.machine.policies import cache_policy

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey


@dataclass(frozen=True)
class Outcome:
    """Totals of a simulated run; prefill chunks are no `cycles`."""

    tokens: int
    cycles: int
    seconds: float
    compute_s: float
    counters: StoreCounters

    @property
    def tokens_per_s(self) -> float | None:
        """Decode throughput."""
        return Ratio(self.tokens, self.seconds).value


def simulate(
    cycles: Sequence[Cycle],
    model: MachineModel,
    cache: str = "none",
    demands: Mapping[ExpertKey, float] | None = None,
) -> Outcome:
    """Decodes cycles from an empty cache to the end; see `cache_policy` for the cache and its errors."""
    machine = open_machine(model, cache_policy(cache, cycles, demands), cycles)
    with no_collection():
        machine.run(cycles)
    seconds = machine.now_s
    machine.close()
    emitted = [cycle.emitted for cycle in cycles]
    return Outcome(sum(emitted), sum(count > 0 for count in emitted), seconds, machine.compute_s, machine.counters)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: walking leaves no circles of references, and looking for them costs a fifth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
