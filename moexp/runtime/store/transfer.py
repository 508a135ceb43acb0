"""A small thread pool that moves experts into slots: demands first, queued prefetches can be promoted or cancelled."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from moexp.runtime.store.pacing import CLOCK, Clock, Pacer
from moexp.runtime.store.slots import Slot
from moexp.target.experts import ExpertKey, ExpertWeights


@dataclass(frozen=True, slots=True)
class Plan:
    """How an expert comes in: `pieces` can move in any order and at once; their meaning is the source's own.

    `gate_up` and `down` are the matrices' places in the slot, in elements, `bias` that of the biases, if there are any;
    `moved_bytes` is asked of the device.
    """

    pieces: tuple[Any, ...]
    moved_bytes: int
    gate_up: int
    down: int
    width: int
    hidden: int
    bias: int | None = None


class Source(Protocol):
    """Where a store's experts come from. `move` and `finish` are called in worker threads."""

    slot_bytes: int

    def plan(self, key: ExpertKey) -> Plan: ...

    def move(self, transfer: Transfer, piece: Any) -> None:
        """Bring one piece into the transfer's slot."""

    def finish(self, transfer: Transfer) -> None:
        """All pieces are in: put the expert in its final form."""

    def close(self) -> None: ...


class Transfer:
    """One expert on its way into a slot, and in it.

    Attributes:
        owner: whoever keeps account of it; `key` is its key.
        unstarted: pieces that no worker has taken yet; pending: pieces not in yet.
        error: why it failed, once it has landed.
        weights: views of the slot, after `view`.
        waiting: where the transfer is to be announced when it lands.
    """

    __slots__ = ("error", "key", "owner", "pending", "plan", "slot", "unstarted", "waiting", "weights")

    weights: ExpertWeights

    def __init__(self, owner: Any, plan: Plan, slot: Slot) -> None:
        self.owner = owner
        self.key: ExpertKey = owner.key
        self.plan = plan
        self.slot = slot
        self.unstarted = set(range(len(plan.pieces)))
        self.pending = len(plan.pieces)
        self.error: Exception | None = None
        self.waiting: list[deque[Transfer]] = []

    def view(self) -> None:
        """Make `weights` of what is in the slot."""
        plan = self.plan
        self.weights = self.slot.weights(plan.gate_up, plan.down, plan.width, plan.hidden, plan.bias)


class Transport(Protocol):
    """What a store needs from the pool (tests put their own in its place).

    `landed` receives every started transfer once, complete or with its `error`.
    """

    landed: SimpleQueue[Transfer]

    def start(self, transfers: Iterable[Transfer], urgent: bool) -> None: ...

    def promote(self, transfers: Iterable[Transfer]) -> None: ...

    def cancel(self, transfer: Transfer) -> bool: ...

    def close(self, wait: bool = True) -> None: ...


class TransferPool:
    """Moves pieces of transfers in `threads` threads.

    Urgent pieces go first, in the order they came. Of the others those of the lowest layer go first, because a block
    walks the layers from the first to the last.

    Args:
        source: does the moving.
        threads: how many pieces are under way at once; under a pacer, its concurrency instead.
        pacer: delays each piece to the time at which an emulated link would have delivered it.
        background: how many of these may be pieces that are not urgent, so that an urgent one does not find the device
            busy with all the others; None: no limit.
        clock: the time that the pacer's delays are in.
    """

    def __init__(
        self,
        source: Source,
        threads: int,
        pacer: Pacer | None = None,
        background: int | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        threads = pacer.concurrency if pacer else threads
        self.landed: SimpleQueue[Transfer] = SimpleQueue()
        self._source = source
        self._pacer = pacer
        self._clock = clock
        self._lock = threading.Lock()
        self._urgent: deque[tuple[Transfer, int]] = deque()
        self._queued: list[tuple[int, int, Transfer, int]] = []  # heap of (layer, running number, transfer, piece)
        self._running_number = 0
        self._background_now = 0
        self._background_limit = min(background or threads, threads)
        # A token a piece wakes one worker; a SimpleQueue does in C what a condition variable does in Python.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"moexp-io-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, transfers: Iterable[Transfer], urgent: bool) -> None:
        """Queue all pieces."""
        items = [(transfer, piece) for transfer in transfers for piece in range(transfer.pending)]
        with self._lock:
            if urgent:
                self._urgent.extend(items)
            else:
                for transfer, piece in items:
                    self._running_number += 1
                    heapq.heappush(self._queued, (transfer.key[0], self._running_number, transfer, piece))
        for _ in items:
            self._tokens.put(None)

    def promote(self, transfers: Iterable[Transfer]) -> None:
        """Make queued pieces urgent; what has begun is left alone."""
        with self._lock:  # they stay in the other queue too, where a worker will find them taken
            items = [(transfer, piece) for transfer in transfers for piece in sorted(transfer.unstarted)]
            self._urgent.extend(items)
        for _ in items:
            self._tokens.put(None)

    def cancel(self, transfer: Transfer) -> bool:
        """Forget the transfer if none of its pieces has begun: True, and it will never land."""
        with self._lock:
            if len(transfer.unstarted) < len(transfer.plan.pieces):
                return False
            transfer.unstarted.clear()
            return True

    def close(self, wait: bool = True) -> None:
        """Let what has begun land, forget the rest, end the threads. Closing twice does nothing."""
        with self._lock:
            self._urgent.clear()
            self._queued.clear()
        self._closing.set()
        for _ in self._threads:
            self._tokens.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while True:
            self._tokens.get()
            # Spurious tokens are harmless, missing ones are not: whoever ends a piece looks for the next by itself.
            while (item := self._next()) is not None:
                transfer, piece, urgent = item
                try:
                    if transfer.error is None:
                        self._move(transfer, transfer.plan.pieces[piece])
                except Exception as error:  # handed to whoever waits for the expert
                    transfer.error = error
                with self._lock:
                    self._background_now -= not urgent
                    transfer.pending -= 1
                    last = not transfer.pending
                if last:
                    self._land(transfer)
            if self._closing.is_set():
                return

    def _next(self) -> tuple[Transfer, int, bool] | None:
        with self._lock:
            while self._urgent:
                transfer, piece = self._urgent.popleft()
                if piece in transfer.unstarted:
                    transfer.unstarted.remove(piece)
                    return transfer, piece, True
            while self._queued and self._background_now < self._background_limit:
                _, _, transfer, piece = heapq.heappop(self._queued)
                if piece in transfer.unstarted:  # else promoted or cancelled meanwhile
                    transfer.unstarted.remove(piece)
                    self._background_now += 1
                    return transfer, piece, False
        return None

    def _move(self, transfer: Transfer, piece: Any) -> None:
        if self._pacer is None:
            self._source.move(transfer, piece)
            return
        share_bytes = transfer.plan.moved_bytes // len(transfer.plan.pieces)
        due_s = self._pacer.reserve(share_bytes, self._clock.now_s())
        self._source.move(transfer, piece)
        self._clock.wait_until(due_s, self._closing)

    def _land(self, transfer: Transfer) -> None:
        try:
            if transfer.error is None:
                self._source.finish(transfer)
        except Exception as error:
            transfer.error = error
        self.landed.put(transfer)
