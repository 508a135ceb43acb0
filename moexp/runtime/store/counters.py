"""Exact counters of an expert store, in total and by phase."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

Phase = Literal["draft", "verify", "ar", "prefill"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(slots=True)
class PhaseCounters:
    """What one phase demanded. `demanded = hit + late + missed`.

    hit: ready when demanded. late: already on its way (queued or being read) when demanded. missed: read on demand.
    stall_s: seconds that `arrivals` spent blocked.
    """

    demanded: int = 0
    hit: int = 0
    late: int = 0
    missed: int = 0
    demand_bytes: int = 0
    stall_s: float = 0.0

    def __sub__(self, before: PhaseCounters) -> PhaseCounters:
        return PhaseCounters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(slots=True)
class StoreCounters:
    """Totals of a store since it was opened, and the same by phase.

    Invariants: `demanded = hit + late + missed`; `prefetched = used + wasted + outstanding`, where outstanding are the
    prefetched experts, in memory or on their way, that were not demanded yet (none is left after `close`);
    `read_bytes = demand_bytes + prefetch_bytes`.

    prefetched: prefetches launched. used: of these, demanded before they were dropped, at most once a residency.
    wasted: of these, dropped without having been demanded; cancelled: of the wasted, dropped before their read began,
    which cost no bytes. Bytes are those asked of the device (so they include alignment), are counted when the last of
    an expert has come in, and belong to the phase or prefetch that launched the read.
    """

    demanded: int = 0
    hit: int = 0
    late: int = 0
    missed: int = 0
    prefetched: int = 0
    used: int = 0
    wasted: int = 0
    cancelled: int = 0
    evicted: int = 0
    read_bytes: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    stall_s: float = 0.0
    phases: dict[Phase, PhaseCounters] = field(default_factory=lambda: {phase: PhaseCounters() for phase in PHASES})

    def snapshot(self) -> StoreCounters:
        """An independent copy."""
        return self - StoreCounters()

    def __sub__(self, before: StoreCounters) -> StoreCounters:
        """Counts since the snapshot `before`."""
        totals = {name: getattr(self, name) - getattr(before, name) for name in TOTALS}
        return StoreCounters(**totals, phases={phase: self.phases[phase] - before.phases[phase] for phase in PHASES})

    def as_dict(self) -> dict[str, float]:
        """Flat, for records: totals by name, then `<phase>_<name>` for each phase that demanded anything."""
        flat: dict[str, float] = {name: getattr(self, name) for name in TOTALS}
        for phase, counts in self.phases.items():
            if counts.demanded:
                flat |= {f"{phase}_{f.name}": getattr(counts, f.name) for f in fields(counts)}
        return flat


TOTALS: tuple[str, ...] = tuple(f.name for f in fields(StoreCounters) if f.name != "phases")
