"""How long the parts of a decoding step take, measured inside the runtime: with its kernels, shapes and padding.

Four kinds of steps are run in turn over a store with every expert in memory, and each part is read off from two of
them: a draft step of one row with one expert and the draft expert, one with k experts and no draft expert, a one-token
AR step, a verification of a whole block.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moexp.runtime.engine.engine import AR, VERIFY, Block, Engine, StepPath
from moexp.runtime.store.opening import open_store
from moexp.runtime.store.store import ExpertStore, ResidentStore
from moexp.target.experts import ExpertWeights
from moexp.target.load import Target

POOL_BYTES = 1 << 30
WARM_UP = 3
PARTS = ("attention", "moe", "shared", "draft", "routed")


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of one kind of step: in total, by parts over all layers, and the layer-experts it computed.

    `draft` is of shared and draft experts together, which run as one block; `shared` of the shared ones alone; `stall`
    the part of `routed` that waited for experts.
    """

    total: float
    attention: float
    moe: float
    shared: float
    draft: float
    routed: float
    experts: float
    stall: float = 0.0


@dataclass(frozen=True)
class ComputeTimes:
    """The four kinds of steps (medians), and the rows of the two that are padded."""

    draft_one: StepTimes
    draft_all: StepTimes
    ar: StepTimes
    verify: StepTimes
    block: int


class TimedEngine(Engine):
    """An engine that adds up where a step's time goes while it is watched."""

    def __init__(self, target: Target, store: ExpertStore, **options: Any) -> None:
        super().__init__(target, store, **options)
        self._spent: dict[str, float] | None = None
        for layer in self._network.layers:
            layer.norm_1 = self._watched("attention", layer.norm_1)
            layer.attend = self._watched("attention", layer.attend)
            moe: Any = layer.moe
            if moe is not None:
                moe.shared = moe.shared and self._watched("shared", moe.shared)
                moe.drafting = moe.drafting and self._watched("draft", moe.drafting)
                computes = moe.compute
                layer.moe = self._watched("moe", moe)  # type: ignore[assignment]
        for compute in computes.values():  # one for all layers
            compute.block = self._watched("routed", compute.block)

    def _watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._spent is None:
                return function(*arguments)
            begin_s = time.perf_counter()
            result = function(*arguments)
            self._spent[part] += time.perf_counter() - begin_s
            return result

        return timed

    def timed_step(self, ids: Sequence[int], path: StepPath) -> StepTimes:
        """Times a step, and rolls it back."""
        length, counters = self.length, self.store.counters
        demanded, stalled_s = counters.demanded, counters.stall_s
        self.store.begin_cycle()
        self._spent = dict.fromkeys(PARTS, 0.0)
        begin_s = time.perf_counter()
        self.run(Block(ids), path)
        total_s = time.perf_counter() - begin_s
        spent, self._spent = self._spent, None
        self.rollback(length)
        parts = {part: seconds * 1e6 for part, seconds in spent.items()}
        stall = (counters.stall_s - stalled_s) * 1e6
        return StepTimes(total_s * 1e6, experts=counters.demanded - demanded, stall=stall, **parts)


def time_steps(
    engine: TimedEngine, prompt: Sequence[int], repeats: int, advance: Callable[[int], None]
) -> ComputeTimes:
    """Runs the four kinds of steps in turn behind a prompt, `repeats` rounds after a warm-up.

    Args:
        prompt: token ids; its last ones make the block that is verified.
    """
    block = list(prompt[-engine.block :])
    kinds: dict[str, tuple[list[int], StepPath]] = {
        "draft_one": (block[:1], StepPath("draft", top_r=1, draft_experts=True)),
        "draft_all": (block[:1], StepPath("draft", top_r=engine.spec.top_k)),
        "ar": (block[:1], AR),
        "verify": (block, VERIFY),
    }
    engine.start(len(prompt) + engine.block)
    engine.prefill(prompt)
    samples: dict[str, list[StepTimes]] = {kind: [] for kind in kinds}
    for done in range(repeats + WARM_UP):
        for kind, (ids, path) in kinds.items():
            samples[kind].append(engine.timed_step(ids, path))
        advance(done + 1)
    return ComputeTimes(block=engine.block, **{kind: _median(times[WARM_UP:]) for kind, times in samples.items()})


def _median(times: Sequence[StepTimes]) -> StepTimes:
    names = StepTimes.__dataclass_fields__
    return StepTimes(**{name: statistics.median(getattr(each, name) for each in times) for name in names})


def resident_store(target: Target, limit: int = POOL_BYTES) -> tuple[ExpertStore, bool]:
    """Every expert in memory; of a target whose experts exceed `limit` bytes, as many stand-ins as fit, each in the
    stead of several experts. Speed does not depend on what the weights are, as long as they outgrow the caches.

    Returns:
        the store, and whether it holds stand-ins.
    """
    index, dtype = target.index, target.dtype
    size = index.expert_bytes * dtype.itemsize // index.dtype.itemsize
    if size * len(index.keys) <= limit:
        return open_store(index, "resident", dtype=dtype), False
    width, hidden = index.shape(index.keys[0])
    count = max(1, limit // size)
    one = (torch.randn(index.elements(index.keys[0])) * hidden**-0.5).to(dtype)
    lengths = [2 * width * hidden, width * hidden, *([2 * width, hidden] if index.biased else [])]
    stand_ins = []
    for row in one.repeat(count, 1):
        gate_up, down, *biases = row.split(lengths)
        stand_ins.append(ExpertWeights(gate_up.view(2 * width, hidden), down.view(hidden, width), *biases))
    return ResidentStore({key: stand_ins[n % count] for n, key in enumerate(index.keys)}), True
