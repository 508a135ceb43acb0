"""Order of copies and slot safety on a GPU, on streams that are none: what is launched runs late, when it is let."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moexp.runtime.store import cuda
from moexp.runtime.store.cuda import CudaSlots, PinnedSource
from moexp.runtime.store.slots import Slot
from moexp.runtime.store.transfer import Transfer
from moexp.target.experts import ExpertKey, ExpertWeights

HIDDEN, WIDTH = 8, 4
A, B = (0, 0), (0, 1)


class Late(TorchFunctionMode):
    """Writes to tensors go to a stream's queue instead of being done."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, Tensor.__setitem__):
            self.stream.queue.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


class Event:
    """A point in a stream's queue: who waits for it lets that stream go on until it is there."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.is_set, self.waited = stream, False, False

    def set(self) -> None:
        self.is_set = True

    def wait(self) -> None:
        self.waited = not self.is_set
        while not self.is_set:
            assert self.stream.queue, "waits for what is never launched"
            self.stream.queue.popleft()()


class Stream:
    """A queue of launched work, done in order by `synchronize`."""

    def __init__(self, device: Any = None) -> None:
        self.queue: deque[Callable[[], Any]] = deque()

    def record_event(self) -> Event:
        event = Event(self)
        self.queue.append(event.set)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.wait)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.popleft()()


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The compute stream of a GPU that is not there."""
    stream = Stream()

    @contextmanager
    def on(side: Stream) -> Any:
        with Late(side):
            yield

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name, value in {
        "Stream": Stream, "stream": on, "current_stream": lambda _: stream, "cudart": lambda: runtime,
    }.items():  # fmt: skip
        monkeypatch.setattr(cuda.torch.cuda, name, value)
    return stream


def expert(value: float) -> ExpertWeights:
    return ExpertWeights(torch.full((2 * WIDTH, HIDDEN), value), torch.full((HIDDEN, WIDTH), value))


def opened() -> tuple[PinnedSource, CudaSlots]:
    source = PinnedSource({A: expert(1.0), B: expert(2.0)}, torch.device("cpu"))
    return source, CudaSlots(source.slot_bytes, torch.float32, torch.device("cpu"), poison=True)


def transfer(source: PinnedSource, key: ExpertKey, slot: Slot) -> Transfer:
    made = Transfer(key, source.plan(key), slot)
    made.view()
    return made


def whole(weights: ExpertWeights, value: float) -> bool:
    return bool((weights.gate_up == value).all() and (weights.down == value).all())


def reused(source: PinnedSource, slots: CudaSlots, compute: Stream) -> tuple[list[bool], bool, bool]:
    """Expert A is used late, its slot given back at once and taken for B.

    Returns:
        whether each use found A whole, whether B waited for the last use of A, whether B is whole in the end.
    """
    first = transfer(source, A, slots.take())
    source.move(first, None)
    assert whole(first.weights, 1.0), "landed before its copy had run"
    found: list[bool] = []
    compute.queue.append(lambda: found.append(whole(first.weights, 1.0)))  # a kernel that has not begun
    with Late(compute):
        slots.give(first.slot)
    second = transfer(source, B, slots.take())
    assert second.slot is first.slot
    source.move(second, None)
    waited = second.slot.last_use.waited
    compute.synchronize()
    return found, waited, whole(second.weights, 2.0)


def test_a_slot_is_not_overwritten_while_a_kernel_may_read_it(compute: Stream):
    assert reused(*opened(), compute) == ([True], True, True)


def test_a_freed_slot_is_poisoned_behind_its_last_use(compute: Stream):
    source, slots = opened()
    landed = transfer(source, A, slots.take())
    source.move(landed, None)
    with Late(compute):
        slots.give(landed.slot)
    assert whole(landed.weights, 1.0)
    compute.synchronize()
    assert bool(landed.weights.gate_up.isnan().all() and landed.weights.down.isnan().all())


def test_without_the_event_of_the_last_use_a_kernel_reads_another_expert(compute: Stream, monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    found, waited, _ = reused(*opened(), compute)
    assert found == [False] and not waited


def test_without_waiting_for_the_copy_an_expert_lands_before_it_is_there(compute: Stream, monkeypatch):
    monkeypatch.setattr(Stream, "synchronize", lambda self: None)
    with pytest.raises(AssertionError, match="before its copy"):
        reused(*opened(), compute)
