"""Which experts are in memory or on their way, and the exact counts of it: bookkeeping without I/O or threads.

The stores drive it with real transfers (T: `Transfer`), the simulator with those of a virtual link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from moexp.runtime.store.counters import Phase, StoreCounters
from moexp.runtime.store.policies import CachePolicy

if TYPE_CHECKING:  # the simulator runs this without torch
    from moexp.target.experts import ExpertKey


T = TypeVar("T")


class Entry(Generic[T]):
    """One expert's stay: from the launch of its transfer to its drop.

    Attributes:
        cycle: in which it was last launched, predicted or demanded.
        phase: that launched it; None: a prefetch.
        unused: a prefetch that was not demanded yet.
        expired: to be dropped as soon as it is not pinned.
        transfer: how it comes; None until it is started, which an interrupt can prevent.
    """

    __slots__ = ("cycle", "expired", "key", "phase", "pins", "ready", "transfer", "unused")

    def __init__(self, key: ExpertKey, cycle: int, phase: Phase | None) -> None:
        self.key = key
        self.cycle = cycle
        self.phase = phase
        self.unused = phase is None
        self.ready = False
        self.pins = 0
        self.expired = False
        self.transfer: T | None = None

    @property
    def started(self) -> T:
        """Its transfer, which has been started."""
        assert self.transfer is not None
        return self.transfer


class Residency(Generic[T]):
    """Entries by key, under a policy and a capacity in experts.

    Args:
        policy: chooses victims; says whether anything stays between cycles.
        capacity: experts in memory and on their way; None: no limit. Pinned experts may exceed it, until released.
        counters: updated in place.
        drop: called with every entry that leaves, ready or cancelled: its memory is free.
        cancel: called with an entry on its way; True where its transfer had not begun and now never will.
    """

    def __init__(
        self,
        policy: CachePolicy,
        capacity: int | None,
        counters: StoreCounters,
        drop: Callable[[Entry[T]], None],
        cancel: Callable[[Entry[T]], bool],
    ) -> None:
        self.entries: dict[ExpertKey, Entry[T]] = {}
        self._policy = policy
        self._spares_cycle = policy.spares_cycle
        self._capacity = capacity
        self._counters = counters
        self._on_drop = drop
        self._cancel = cancel
        self._cycle = 0
        self._touched = 0  # entries whose `cycle` is the present one
        self._announced: dict[int, dict[ExpertKey, Entry[T]]] = {}  # layer -> undemanded prefetches on their way

    def begin_cycle(self) -> None:
        """Cancel queued prefetches; under a policy that keeps nothing, drop all that is ready (pinned: on release)."""
        for layer in list(self._announced):
            self._cancel_layer(layer)
        self._cycle += 1
        self._touched = 0
        if self._policy.keeps:
            return
        for entry in list(self.entries.values()):
            if entry.pins:
                entry.expired = True
            elif entry.ready:
                self._drop(entry)

    def prefetch(self, keys: Iterable[ExpertKey]) -> list[Entry[T]]:
        """Entries to bring in, without giving up anything of this cycle. Present experts count as of this cycle."""
        absent = []
        for key in keys:
            entry = self.entries.get(key)
            if entry is None:
                absent.append(key)
            else:
                self._touch(entry)
        launched = []
        for key in absent:
            if key in self.entries or not self._make_room(urgent=False):
                continue
            entry = self._insert(key, None)
            self._announced.setdefault(key[0], {})[key] = entry
            launched.append(entry)
        self._counters.prefetched += len(launched)
        return launched

    def demand(self, keys: Sequence[ExpertKey], phase: Phase) -> tuple[list[Entry[T]], list[Entry[T]], list[Entry[T]]]:
        """Pin distinct keys: (their entries in order, of these the ones to bring in, the ones already on their way)."""
        assert len(set(keys)) == len(keys), "an expert demanded twice in one request"
        table, cycle, on_demand = self.entries, self._cycle, self._policy.on_demand
        entries, late, absent = [], [], []
        for key in keys:
            entry = table.get(key)
            if entry is None:
                absent.append(key)
                continue
            entries.append(entry)
            entry.pins += 1
            entry.expired = False
            if entry.cycle != cycle:
                entry.cycle = cycle
                self._touched += 1
            if entry.unused:
                entry.unused = False
                self._counters.used += 1
            if not entry.ready:
                late.append(entry)
                self._announced.get(key[0], {}).pop(key, None)
            on_demand(key)
        if phase != "draft" and self._announced:  # drafting runs ahead of the layers that its prefetches are for
            for layer in {key[0] for key in keys}:
                self._cancel_layer(layer)
        missing = []
        full = self._capacity is not None
        for key in absent:  # after everything present is pinned
            if full:
                self._make_room(urgent=True)
            entry = self._insert(key, phase)
            entry.pins = 1
            on_demand(key)
            missing.append(entry)
        if absent:
            entries = [table[key] for key in keys]
        for counts in (self._counters, self._counters.phases[phase]):
            counts.demanded += len(keys)
            counts.missed += len(missing)
            counts.late += len(late)
            counts.hit += len(keys) - len(missing) - len(late)
        return entries, missing, late

    def landed(self, entry: Entry, moved_bytes: int) -> None:
        """The entry's expert has come in."""
        entry.ready = True
        if entry.unused:
            self._announced.get(entry.key[0], {}).pop(entry.key, None)
        counters = self._counters
        counters.read_bytes += moved_bytes
        if entry.phase is None:
            counters.prefetch_bytes += moved_bytes
        else:
            counters.demand_bytes += moved_bytes
            counters.phases[entry.phase].demand_bytes += moved_bytes
        if entry.expired and not entry.pins:  # released before it came
            self._drop(entry)
        if self._capacity is not None:
            self._shrink()

    def failed(self, entry: Entry[T]) -> None:
        """The entry's expert could not be brought in: it is forgotten, and a later demand tries again."""
        self._drop(entry)

    def release(self, entries: Iterable[Entry[T]], phase: Phase) -> None:
        """Undo the pins of one `demand` in `phase`.

        Outside drafting a cycle demands a layer once. A policy that keeps nothing therefore drops its experts here
        already: few slots in turn, still warm in the processor's cache, instead of all the cycle's.
        """
        passing = not self._policy.keeps and phase != "draft"
        for entry in entries:
            entry.pins -= 1
            if passing:
                entry.expired = True
            if entry.expired and entry.ready and not entry.pins:
                self._drop(entry)
        if self._capacity is not None:
            self._shrink()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return all(entry.ready for entry in self.entries.values())

    def cancel_all(self) -> None:
        """Cancel every queued prefetch."""
        for layer in list(self._announced):
            self._cancel_layer(layer)

    def clear(self) -> None:
        """Drop everything; no transfer may be under way."""
        for entry in list(self.entries.values()):
            self._drop(entry)

    def _touch(self, entry: Entry[T]) -> None:
        entry.expired = False
        if entry.cycle != self._cycle:
            entry.cycle = self._cycle
            self._touched += 1

    def _insert(self, key: ExpertKey, phase: Phase | None) -> Entry[T]:
        entry = self.entries[key] = Entry(key, self._cycle, phase)
        self._touched += 1
        self._policy.on_insert(key)
        return entry

    def _drop(self, entry: Entry[T]) -> None:
        del self.entries[entry.key]
        self._policy.on_drop(entry.key)
        if entry.cycle == self._cycle:
            self._touched -= 1
        if entry.unused:
            self._announced.get(entry.key[0], {}).pop(entry.key, None)
            self._counters.wasted += 1
        self._on_drop(entry)

    def _cancel_layer(self, layer: int) -> None:
        for entry in list(self._announced.get(layer, {}).values()):
            if self._cancel(entry):
                self._counters.cancelled += 1
                self._drop(entry)

    def _make_room(self, urgent: bool) -> bool:
        """Room for one more, at the cost of a victim if need be. Without room, only a demand goes ahead."""
        if self._capacity is None or len(self.entries) < self._capacity:
            return True
        victim = self._victim(urgent)
        if victim is not None:
            self._counters.evicted += 1
            self._drop(victim)
        return victim is not None

    def _victim(self, urgent: bool) -> Entry[T] | None:
        table, cycle, key = self.entries, self._cycle, None

        def stale(key: ExpertKey) -> bool:
            entry = table[key]
            return entry.cycle != cycle and entry.ready and not entry.pins

        if self._touched < len(table) and (self._spares_cycle or not urgent):
            key = self._policy.victim(stale)
        if key is None and urgent:

            def idle(key: ExpertKey) -> bool:
                return table[key].ready and not table[key].pins

            def spent(key: ExpertKey) -> bool:
                return idle(key) and not table[key].unused

            key = (self._policy.victim(spent) if self._spares_cycle else None) or self._policy.victim(idle)
        return None if key is None else table[key]

    def _shrink(self) -> None:
        """Give up what exceeds the capacity, as far as it is not pinned or on its way."""
        while self._capacity is not None and len(self.entries) > self._capacity:
            victim = self._victim(urgent=True)
            if victim is None:
                return
            self._counters.evicted += 1
            self._drop(victim)
