"""Expert stores: one interface for AR, drafting and verification, and the store that holds all experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

from moexp.runtime.store.counters import Phase, StoreCounters
from moexp.runtime.store.residency import Entry
from moexp.runtime.store.transfer import Transfer
from moexp.target.experts import ExpertKey, ExpertWeights


class Ticket:
    """A demand for experts; they are pinned from `request` to `release`."""

    __slots__ = ("arrived", "entries", "keys", "left", "phase", "released")

    def __init__(self, keys: tuple[ExpertKey, ...], phase: Phase) -> None:
        self.keys = keys
        self.phase = phase
        self.released = False
        self.left = len(keys)  # not yet yielded
        self.entries: list[Entry[Transfer]] = []
        self.arrived: deque[Transfer] = deque()  # in memory (or failed), not yet yielded


class ExpertStore:
    """Serves experts by key.

    `request` -> `arrivals` -> `release` is the demand path, `prefetch` announces what will probably be demanded. An
    expert is never read twice while it is in memory or on its way. All methods are called from one thread. A `with`
    block closes the store at its end.

    Attributes:
        counters: what it did, exactly.
        expert_bytes: weight bytes of an expert.
    """

    counters: StoreCounters
    expert_bytes: int

    def begin_cycle(self) -> None:
        """Start a decoding cycle (AR: a step). Policy `none` drops here whatever came in before (and, outside phase
        "draft", each expert as soon as it is released: a cycle demands a layer once). Prefetches whose read has not
        begun are cancelled under every policy: their cycle is over."""

    def prefetch(self, keys: Iterable[ExpertKey]) -> int:
        """Launch reads of what is neither in memory nor on its way, as far as the budget has room without giving up
        anything of this cycle. Never blocks. Returns the number launched."""
        return 0

    def request(self, keys: Sequence[ExpertKey], phase: Phase) -> Ticket:
        """Demand distinct experts: pins them and starts reads of what is missing, before any queued prefetch. Never
        blocks. Outside phase "draft", queued prefetches of the same layers that were not demanded are cancelled."""
        raise NotImplementedError

    def arrivals(self, ticket: Ticket) -> Iterator[tuple[ExpertKey, ExpertWeights]]:
        """Each expert of the ticket once, as it arrives: those already in memory first, in the order of the request.
        Blocks only for what is missing, and counts that as `stall_s`.

        Raises:
            MoexpError: an expert could not be read.
        """
        raise NotImplementedError

    def release(self, ticket: Ticket) -> None:
        """Unpin the ticket's experts; their tensors must not be used any more. Releasing twice does nothing."""
        ticket.released = True

    def settle(self) -> None:
        """Wait for what is on its way, and let the policy drop what its cycle is over for: nothing of what was done
        before is done after. No ticket may be open."""

    def close(self) -> None:
        """Stop reading and give the memory back. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ResidentStore(ExpertStore):
    """All experts in memory: every demand is a hit.

    Args:
        weights: every expert.
    """

    def __init__(self, weights: Mapping[ExpertKey, ExpertWeights]) -> None:
        self.counters = StoreCounters()
        self.weights = weights
        self.expert_bytes = max(w.nbytes for w in weights.values())

    def request(self, keys: Sequence[ExpertKey], phase: Phase) -> Ticket:
        for counts in (self.counters, self.counters.phases[phase]):
            counts.demanded += len(keys)
            counts.hit += len(keys)
        return Ticket(tuple(keys), phase)

    def arrivals(self, ticket: Ticket) -> Iterator[tuple[ExpertKey, ExpertWeights]]:
        for key in ticket.keys[len(ticket.keys) - ticket.left :]:
            ticket.left -= 1
            yield key, self.weights[key]
