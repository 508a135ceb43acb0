from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moexp.base.errors import MoexpError
from moexp.learn.core import loop
from moexp.learn.core.loop import Metrics, Run, Schedule, own_rows, train
from moexp.learn.core.optimizers import Updates


class Problem:
    """Fits a line, with noise that a step draws from its own number, and a tensor that is no parameter."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.bias = nn.Parameter(torch.zeros(2))
        self.matrix = nn.Parameter(torch.arange(12.0).view(3, 4) / 12)
        self.drift = torch.zeros(2)
        self.named = {"weight": self.weight, "bias": self.bias, "matrix": self.matrix}
        self.seen: list[int] = []

    def step(self, step: int) -> Metrics:
        self.seen.append(step)
        noise = torch.randn(6, generator=torch.Generator().manual_seed(step))
        loss = ((self.weight - noise) ** 2).sum() + ((self.bias - self.drift) ** 2).sum()
        loss = loss + (self.matrix @ noise[:4] - noise[3:]).square().sum()
        loss.backward()
        self.drift += 0.1
        return {"loss": float(loss.detach())}

    def train(self, checkpoint: Path | None = None, updates: Updates | None = None, **run: Any) -> int:
        schedule = Schedule(steps=9, lr=0.05, warmup=3)
        return train(
            self.named, schedule, self.step, updates or Updates(), Run(checkpoint, **run), {"drift": self.drift}
        )

    def state(self) -> list[Tensor]:
        return [self.weight.detach(), self.bias.detach(), self.matrix.detach(), self.drift]


def same(one: Problem, other: Problem) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state(), other.state(), strict=True))


@pytest.mark.parametrize(("at", "optimizer"), [(1, "adamw"), (4, "adamw"), (8, "adamw"), (4, "muon")])
def test_ctrl_c_inside_a_step_ends_it_whole_and_the_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    at, optimizer, tmp_path
):
    whole, first, second = Problem(), Problem(), Problem()
    assert whole.train(updates=Updates(optimizer)) == 9
    plain_step = first.step

    def interrupted_step(step: int) -> Metrics:
        if step == at:
            os.kill(os.getpid(), signal.SIGINT)
        return plain_step(step)

    first.step = interrupted_step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.train(tmp_path / "state", updates=Updates(optimizer))
    assert first.seen == list(range(at + 1))
    assert second.train(tmp_path / "state", updates=Updates(optimizer)) == 9
    assert second.seen == list(range(at + 1, 9))
    assert same(second, whole) and same(first, whole) == (at == 8)


def test_muon_learns_the_matrices_and_adamw_the_rest():
    plain, muon = Problem(), Problem()
    plain.train(updates=Updates(clip=1e9))
    muon.train(updates=Updates("muon", clip=1e9))
    assert torch.equal(plain.weight, muon.weight) and torch.equal(plain.bias, muon.bias)
    assert not torch.allclose(plain.matrix, muon.matrix, atol=1e-3)


def test_a_second_ctrl_c_is_not_held_back_and_the_handler_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    problem = Problem()

    def step(step: int) -> Metrics:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    problem.step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        problem.train(tmp_path / "state")
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "state").exists()  # what a step left half done must not be resumed from


def test_a_run_that_dies_goes_on_from_its_last_checkpoint(tmp_path: Path):
    class Dead(BaseException):
        pass

    def die(step: int, metrics: Metrics) -> None:
        if step == 5:  # after the update, before its checkpoint
            raise Dead

    with pytest.raises(Dead):
        Problem().train(tmp_path / "state", checkpoint_every_s=0.0, on_step=die)
    whole, resumed = Problem(), Problem()
    whole.train()
    resumed.train(tmp_path / "state")
    assert resumed.seen == [4, 5, 6, 7, 8]
    assert same(resumed, whole)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    Problem().train(tmp_path / "state", checkpoint_every_s=0.0, identity="mine")
    with pytest.raises(MoexpError, match=r"another run.*identity yours"):
        Problem().train(tmp_path / "state", identity="yours")


def test_a_full_disk_is_an_error_and_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch):
    Problem().train(tmp_path / "state", checkpoint_every_s=0.0)
    before = {file.name: file.read_bytes() for file in (tmp_path / "state").iterdir()}

    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No space left on device (os error 28)")

    monkeypatch.setattr(loop, "save_file", full)
    (tmp_path / "other").mkdir()
    with pytest.raises(MoexpError, match="disk full"):
        Problem().train(tmp_path / "other" / "state", checkpoint_every_s=0.0)
    assert list((tmp_path / "other").iterdir()) == []
    assert {file.name: file.read_bytes() for file in (tmp_path / "state").iterdir()} == before


def test_training_works_outside_the_main_thread():
    problem, taken = Problem(), list[int]()
    thread = threading.Thread(target=lambda: taken.append(problem.train()))
    thread.start()
    thread.join()
    assert taken == [9]


def test_a_batch_that_overflows_is_dropped():
    problem = Problem()

    def step(step: int) -> Metrics:
        (problem.weight.sum() * (math.inf if step == 1 else 0.0)).backward()
        return {}

    before = problem.weight.detach().clone()
    problem.step = step  # type: ignore[method-assign]
    assert problem.train() == 9
    assert torch.equal(problem.weight, before)


def test_a_scaled_rate_applies_to_the_names_that_start_with_its_key():
    problem = Problem()
    before = problem.bias.detach().clone()
    problem.train(updates=Updates(lr_scale={"bia": 0.0}))
    assert torch.equal(problem.bias, before) and problem.weight.grad is None


def test_the_rate_warms_up_and_falls_to_its_last_share():
    schedule = Schedule(steps=100, lr=1.0, warmup=10)
    rates = [schedule.rate(step, 0.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, rel=1e-3)
    assert max(rates) == rates[9] or max(rates) == rates[10]
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(0.05)


def test_a_time_cap_compresses_the_schedule_and_ends_the_run(monkeypatch):
    schedule = Schedule(steps=100, lr=1.0, max_minutes=1.0)
    assert schedule.progress(10, 30.0) == 0.5
    assert schedule.progress(80, 30.0) == 0.8
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    problem = Problem()

    def step(step: int) -> Metrics:
        now[0] += 13.0
        problem.weight.sum().backward()
        return {}

    assert train(problem.named, schedule, step) == 5


@given(total=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 5))
def test_an_epoch_of_batches_holds_each_row_once(total: int, size: int, seed: int):
    per_epoch = max(1, total // size)
    for epoch in range(2):
        batches = [own_rows(torch.arange(total), size, epoch * per_epoch + place, seed) for place in range(per_epoch)]
        rows = torch.cat(batches).tolist()
        assert len(rows) == len(set(rows)) == min(total, per_epoch * size)
        assert all(0 <= row < total for row in rows)
    assert torch.equal(*(own_rows(torch.arange(total), size, 3, seed) for _ in range(2)))
