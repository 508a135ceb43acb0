"""What the machine gives beside a run: short steps, and bursts of transfers, through its own store between requests.

Memory, disk and processor drift within minutes, so constants that a run is to be predicted by must come from beside it.
Probes decode text of their own. Of a step, the parts that compute are measured apart from the waiting: predictions
from them (`moexp.sim.validation.probe_prices`) take the computing only, and the link from the bursts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from moexp.records import ProbeRecord, RecordWriter
from moexp.runtime.engine.engine import AR, VERIFY, StepPath
from moexp.runtime.store.store import ExpertStore
from moexp.sim.calibration.step_timer import TimedEngine
from moexp.sim.validation.probe_prices import AR_STEP, BURST, DRAFT_MORE, DRAFT_ONE, VERIFY_STEP
from moexp.tables.core.run import PROBES
from moexp.target.draft_expert import DraftExperts
from moexp.target.load import Target

SHARE, BURST_SHARE = 0.03, 0.015
"""Of a run's time, what probes of steps may take once each kind was probed, and what bursts may."""
QUICK_S = 1.0
DRAFTED = 3  # experts of the draft step that shows what an expert costs
ROWS = 5  # of the verification: the papers' K = 4 and the pending token


class RunProbe:
    """Probes a run's store; a context manager.

    Args:
        target: the run's.
        store: the run's, of a kind that keeps nothing between cycles.
        draft_experts: as its engine has them.
        text: token ids to decode.
        folder: the platform's; `probes.jsonl` is continued.
        bursts: whether the link is probed too (an emulated one is known).
    """

    def __init__(
        self,
        target: Target,
        store: ExpertStore,
        draft_experts: DraftExperts,
        text: Sequence[int],
        folder: Path,
        bursts: bool,
    ) -> None:
        self._engine = TimedEngine(target, store, draft_experts=draft_experts)
        self._engine.start(len(text) + self._engine.block)
        rows = list(text[:ROWS])
        top_k = self._engine.spec.top_k
        self._steps = {
            DRAFT_ONE: (rows[:1], StepPath("draft", top_r=1, draft_experts=True)),
            DRAFT_MORE: (rows[:1], StepPath("draft", top_r=min(DRAFTED, top_k))),
            AR_STEP: (rows[:1], AR),
            VERIFY_STEP: (rows, VERIFY),
        }
        self._random = random.Random(0)
        sizes = {1, top_k, min(3 * top_k, target.spec.num_experts)}
        self._sizes = sorted(sizes) if bursts else []
        self._next, self._taken = 0, dict[str, float]()
        self._cost_s, self._burst_cost_s = 0.0, 0.0
        self._file = RecordWriter(folder / PROBES)
        self._begin_s = time.perf_counter()

    def __enter__(self) -> RunProbe:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __call__(self, complete: int) -> None:
        """Takes the probes whose turn it is, as many as time allows: each kind at first, then a share. A disk changes
        faster than all else, and a burst takes little.

        Args:
            complete: requests of the run that are.
        """
        if self._sizes and self._affordable(BURST, self._burst_cost_s, BURST_SHARE):
            self._burst_cost_s += self._take(complete, BURST, self._burst)
        kinds = list(self._steps)
        for _ in kinds:
            kind = kinds[self._next % len(kinds)]
            if not self._affordable(kind, self._cost_s, SHARE):
                return
            self._next += 1
            self._cost_s += self._take(complete, kind, partial(self._step, kind))

    def _affordable(self, kind: str, cost_s: float, share: float) -> bool:
        took_s = self._taken.get(kind)
        return took_s is None or cost_s + took_s <= share * (time.perf_counter() - self._begin_s)

    def _take(self, complete: int, kind: str, take: Callable[[], dict[str, float]]) -> float:
        begin_s = time.perf_counter()
        parts = take()
        if kind not in self._taken and time.perf_counter() - begin_s < QUICK_S:
            parts = take()  # the very first touches memory for the first time, which a long step does not notice
        self._taken[kind] = took_s = time.perf_counter() - begin_s
        self._file.write(ProbeRecord(complete, kind, took_s, parts))
        return took_s

    def _step(self, kind: str) -> dict[str, float]:
        """Seconds of a step's parts."""
        ids, path = self._steps[kind]
        times = asdict(self._engine.timed_step(ids, path))
        return {name: value if name == "experts" else value * 1e-6 for name, value in times.items()} | {
            "rows": float(len(ids))
        }

    def _burst(self) -> dict[str, float]:
        return {str(size): min(self._ask(size), self._ask(size)) for size in self._sizes}

    def _ask(self, size: int) -> float:
        """Seconds until so many experts of a layer, which no request has demanded, are in memory."""
        store, spec = self._engine.store, self._engine.spec
        layer = self._random.choice(list(spec.moe_layers))
        keys = [(layer, expert) for expert in self._random.sample(range(spec.num_experts), size)]
        store.begin_cycle()
        begin_s = time.perf_counter()
        ticket = store.request(keys, "ar")
        for _ in store.arrivals(ticket):
            pass
        took_s = time.perf_counter() - begin_s
        store.release(ticket)
        store.begin_cycle()
        return took_s
