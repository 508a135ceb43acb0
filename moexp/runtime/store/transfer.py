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

    `gate_up` and `down` are the matrices' offsets in the slot, in elements, `bias` that of the biases or None;
    `moved_bytes` is asked of the device.
    """

    pieces: tuple[Any, ...]
    moved_bytes: int
    width: int
    hidden: int
    gate_up: int
    down: int
    bias: int | None = None


@dataclass(frozen=True)
class StoreOptions:
    """How experts are moved.

    Attributes:
        io_threads: pieces under way at once; under a pacer, its concurrency instead.
        prefetch_threads: of these, how many may be busy with prefetches; None: a quarter (all under a pacer). A demand
            waits for whatever the device has begun: with all eight at it, a drafting step took 1.4 times as long.
        pacer: delays each piece to the time at which an emulated link would have delivered it.
        clock: the time that stalls are measured in, and pacing is done by (for tests).
        poison: fill freed slots with NaN, so that a use after release shows (for tests).
    """

    io_threads: int = 8
    prefetch_threads: int | None = None
    pacer: Pacer | None = None
    clock: Clock = CLOCK
    poison: bool = False


class Source(Protocol):
    """Where a store's experts come from. `move` and `finish` are called in worker threads."""

    slot_bytes: int

    def plan(self, key: ExpertKey) -> Plan: ...

    def move(self, transfer: Transfer, piece: Any) -> None:
        """Bring one piece into the transfer's slot."""

    def finish(self, transfer: Transfer) -> None:
        """All pieces are in: bring the expert into its final form."""

    def close(self) -> None: ...


class Transfer:
    """One expert on its way into a slot, and in it.

    Attributes:
        unstarted: pieces that no worker has begun; pending: pieces not in yet.
        error: why it failed, once it has landed.
        weights: views of the slot, after `view`.
        waiting: where the transfer is to be announced when it lands.
    """

    __slots__ = ("error", "key", "pending", "plan", "slot", "unstarted", "waiting", "weights")

    weights: ExpertWeights

    def __init__(self, key: ExpertKey, plan: Plan, slot: Slot) -> None:
        self.key = key
        self.plan = plan
        self.slot = slot
        self.unstarted = set(range(len(plan.pieces)))
        self.pending = len(plan.pieces)
        self.error: Exception | None = None
        self.waiting: list[deque[Transfer]] = []

    def view(self) -> None:
        """Make `weights` of what is in the slot."""
        plan = self.plan
        self.weights = self.slot.weights(plan.width, plan.hidden, plan.gate_up, plan.down, plan.bias)


class TransferPool:
    """Moves pieces of transfers in `threads` threads.

    Urgent pieces go first, in the order they came. Of the others those of the lowest layer go first, because a block
    walks the layers from the first to the last.

    Args:
        source: does the moving.
        options: threads and pacing.

    Attributes:
        landed: receives every started transfer once, complete or with its `error`.
    """

    def __init__(self, source: Source, options: StoreOptions) -> None:
        pacer = options.pacer
        threads = pacer.concurrency if pacer else options.io_threads
        background = options.prefetch_threads or (threads if pacer else max(1, threads // 4))
        self.landed: SimpleQueue[Transfer] = SimpleQueue()
        self._source = source
        self._pacer = pacer
        self._clock = options.clock
        self._lock = threading.Lock()
        self._urgent: deque[tuple[Transfer, int]] = deque()
        self._queued: list[tuple[int, int, Transfer, int]] = []  # heap of (layer, running number, transfer, piece)
        self._running_number = 0
        self._background_now = 0
        self._background_limit = min(background, threads)
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
