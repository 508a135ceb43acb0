"""One simulated run: cycles on a machine under a cache policy, and what came of it. Sums are kept, divided once."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moexp.base.errors import MoexpError
from moexp.metrics import Ratio
from moexp.runtime.store.counters import StoreCounters
from moexp.runtime.store.policies import POLICIES, CachePolicy, make_policy
from moexp.sim.belady import Belady, demand_order
from moexp.sim.cold import open_machine
from moexp.sim.machine import MachineModel
from moexp.sim.walk import Cycle

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey

BELADY = "belady"
CACHES = (*POLICIES, BELADY)
"""Cache policies that can be simulated."""


@dataclass(frozen=True)
class Outcome:
    """Totals of a simulated run. Every number of it is simulated."""

    tokens: int
    cycles: int
    seconds: float
    compute_s: float
    counters: StoreCounters

    @property
    def tokens_per_s(self) -> float | None:
        """Decode throughput."""
        return Ratio(self.tokens, self.seconds).value

    @property
    def alpha(self) -> float | None:
        """Tokens emitted a cycle."""
        return Ratio(self.tokens, self.cycles).value

    @property
    def hit(self) -> float | None:
        """Demanded experts that were in memory or on their way."""
        return Ratio(self.counters.hit + self.counters.late, self.counters.demanded).value

    @property
    def prefetch_waste(self) -> float | None:
        """Prefetched experts that nobody demanded."""
        return Ratio(self.counters.wasted, self.counters.prefetched).value

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes moved a token emitted."""
        return Ratio(self.counters.read_bytes, self.tokens).value


def simulate(
    cycles: Sequence[Cycle],
    model: MachineModel,
    cache: str = "none",
    demands: Mapping[ExpertKey, float] | None = None,
) -> Outcome:
    """Decodes cycles from an empty cache to the end.

    Args:
        cache: one of `CACHES`.
        demands: the histogram of "static-hot".

    Raises:
        MoexpError: an unknown policy, or one that lacks its histogram.
    """
    machine = open_machine(model, cache_policy(cache, cycles, demands), cycles)
    with no_collection():
        machine.run(cycles)
    seconds = machine.now_s
    machine.close()
    emitted = [cycle.emitted for cycle in cycles]
    counted = sum(1 for count in emitted if count)
    return Outcome(sum(emitted), counted, seconds, machine.compute_s, machine.counters)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: walking leaves no circles of references, and looking for them costs a fifth."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def cache_policy(name: str, cycles: Sequence[Cycle], demands: Mapping[ExpertKey, float] | None = None) -> CachePolicy:
    """A new policy for a run of these cycles."""
    if name == BELADY:
        return Belady(demand_order(cycles))
    if name not in POLICIES:
        raise MoexpError(f"unknown cache policy {name!r}", where="cache", valid=", ".join(CACHES))
    return make_policy(name, demands)
