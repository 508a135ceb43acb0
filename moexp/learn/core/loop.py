"""One training loop: deterministic batches, a warm-up and cosine schedule, checkpoints that resume exactly.

A batch is a pure function of (seed, step): the data position needs no state, and a run may go on with another number of
processes (`moexp/base/ranks.py`). Checkpoints are safetensors beside a JSON header, written atomically.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from moexp.base import ranks
from moexp.base.atomic import new_folder, recover_folder
from moexp.base.errors import MoexpError
from moexp.base.progress import note_of, stage
from moexp.learn.core.optimizers import ADAMW, STATE, Updates, update

Metrics = dict[str, float]
OnStep = Callable[[int, Metrics], None]
"""Called after a step with the number of steps taken and the step's metrics."""
FINAL = 0.05  # of the peak learning rate
REPEATED_S = 5.0  # a launcher passes on the Ctrl-C that its processes have had already


@dataclass(frozen=True)
class Schedule:
    """A warm-up, then a cosine to `FINAL` of the peak rate over `steps`, compressed to end within `max_minutes`."""

    steps: int
    lr: float
    warmup: int = 20
    max_minutes: float | None = None

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the run that lies behind, by steps or by time, whichever is further."""
        done = step / max(1, self.steps)
        return min(1.0, max(done, elapsed_s / (60 * self.max_minutes)) if self.max_minutes else done)

    def rate(self, step: int, elapsed_s: float) -> float:
        """The learning rate of update `step` (from 0)."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step, elapsed_s)))
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup)) * (FINAL + (1 - FINAL) * cosine)


@dataclass(frozen=True)
class Run:
    """Where a training is saved, and what watches it."""

    checkpoint: Path | None = None  # folder to resume from and to write to; None saves nothing
    identity: str = ""  # what a checkpoint belongs to; one with another identity is refused
    on_step: OnStep = lambda step, metrics: None
    checkpoint_every_s: float = 60.0


UNSAVED = Run()


@contextmanager
def followed(title: str, steps: int, *shown: str, log: list[dict[str, Any]] | None = None) -> Iterator[OnStep]:
    """Shows a training's progress with the metrics `shown`, and adds each step to `log`."""
    with stage(title, steps) as advance:

        def on_step(step: int, metrics: Metrics) -> None:
            advance(step, note_of(metrics, *shown))
            if log is not None:
                log.append({"step": step, **metrics})

        yield on_step


def own_rows(rows: Tensor, size: int, step: int, seed: int) -> Tensor:
    """This process's share of batch `step`: an epoch is a fresh seeded permutation, whose tail is dropped.

    Raises:
        MoexpError: the batch cannot be dealt evenly to the processes.
    """
    epoch, batch = divmod(step, max(1, len(rows) // size))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return rows[ranks.share(order[batch * size : (batch + 1) * size])]


def train(
    named: Mapping[str, nn.Parameter],
    schedule: Schedule,
    step_fn: Callable[[int], Metrics],
    updates: Updates = ADAMW,
    run: Run = UNSAVED,
    extra: Mapping[str, Tensor] | None = None,
) -> int:
    """Runs `step_fn` (which computes a loss and calls backward) until the schedule ends; returns the steps taken.

    `extra` are tensors that steps change besides the parameters `named`: saved and restored with them. Ctrl-C takes
    effect at the end of a step, with a checkpoint; a second one at once, without.

    In a run of several processes, `step_fn` gives the mean over its own share of the batch; gradients are averaged in
    the order of ranks, so that replicas stay equal to the bit. Rank 0 alone saves; Ctrl-C in one process stops all.

    Raises:
        MoexpError: the checkpoint belongs to another run.
    """
    optimizers, extra = updates.optimizers(named), extra or {}
    step, before_s = _resume(run, named, optimizers, extra)
    ranks.take_main([*named.values(), *extra.values()])
    started = saved = time.monotonic()

    def elapsed_s() -> float:
        return before_s + time.monotonic() - started

    def save() -> None:
        if run.checkpoint is not None and ranks.is_main():
            header = {"step": step, "elapsed_s": elapsed_s(), "identity": run.identity}
            _save(run.checkpoint, header, named, optimizers, extra)
        ranks.barrier()

    with _interrupt_noted() as interrupted:
        while step < schedule.steps and schedule.progress(step, now_s := ranks.from_main(elapsed_s())) < 1.0:
            rate = schedule.rate(step, now_s)
            metrics = _joined(named, step_fn(step))
            norm = float(nn.utils.clip_grad_norm_(named.values(), updates.clip))
            if math.isfinite(norm):  # a batch that overflows is dropped, not learned from
                update(optimizers, rate)
            for parameter in named.values():
                parameter.grad = None
            step += 1
            run.on_step(step, {**metrics, "lr": rate, "grad_norm": norm, "elapsed_s": elapsed_s()})
            if ranks.any_of(interrupted()):
                save()
                raise KeyboardInterrupt
            if ranks.from_main(time.monotonic() - saved > run.checkpoint_every_s):
                save()
                saved = time.monotonic()
    return step


def _joined(named: Mapping[str, nn.Parameter], metrics: Metrics) -> Metrics:
    """Averages the gradients over the processes in place; gives the mean of their metrics."""
    if ranks.world() == 1:
        return metrics
    parts = ranks.gathered((metrics, {name for name, parameter in named.items() if parameter.grad is not None}))
    learned = set().union(*(names for _, names in parts))
    gradients = []
    for parameter in (parameter for name, parameter in named.items() if name in learned):
        if parameter.grad is None:  # this process's rows gave none, but another's did
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    ranks.average(gradients)
    return {name: sum(each[name] for each, _ in parts) / len(parts) for name in metrics}


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C is only noted: cut in half, an update would be neither done nor undone."""
    before = signal.getsignal(signal.SIGINT)
    noted: float | None = None

    def note(number: int, frame: object) -> None:
        nonlocal noted
        if noted is not None:
            if ranks.world() > 1 and time.monotonic() - noted < REPEATED_S:
                return
            raise KeyboardInterrupt
        noted = time.monotonic()
        print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr)

    # Only the main thread may do this, and a process in the background may have the signal ignored.
    handles = threading.current_thread() is threading.main_thread() and callable(before)
    if handles:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted is not None
    finally:
        if handles:
            signal.signal(signal.SIGINT, before)


def _save(
    folder: Path,
    header: dict[str, Any],
    named: Mapping[str, nn.Parameter],
    optimizers: Mapping[str, Optimizer],
    extra: Mapping[str, Tensor],
) -> None:
    tensors = {f"extra.{name}": tensor for name, tensor in extra.items()}
    for name, parameter in named.items():
        tensors[f"parameter.{name}"] = parameter
        state = optimizers[name].state.get(parameter, {})  # empty before its first update
        tensors |= {f"{key}.{name}": state[key] for key in STATE if key in state}
    with new_folder(folder) as temp:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temp / "state.safetensors")
        (temp / "state.json").write_text(json.dumps(header))


def _resume(
    run: Run, named: Mapping[str, nn.Parameter], optimizers: Mapping[str, Optimizer], extra: Mapping[str, Tensor]
) -> tuple[int, float]:
    """Steps and seconds of the checkpoint, whose tensors are taken over; (0, 0.0) where there is none."""
    folder = run.checkpoint
    if folder is None:
        return 0, 0.0
    ranks.on_main(lambda: recover_folder(folder))
    if not (folder / "state.json").exists():
        return 0, 0.0
    header = json.loads((folder / "state.json").read_text())
    if header["identity"] != run.identity:
        raise MoexpError(
            "the checkpoint was written by another run",
            where=str(folder),
            valid=f"identity {run.identity}, or another --out",
        )
    with safe_open(folder / "state.safetensors", "pt") as saved, torch.no_grad():
        keys = set(saved.keys())
        for name, tensor in extra.items():
            tensor.copy_(saved.get_tensor(f"extra.{name}"))
        for name, parameter in named.items():
            parameter.copy_(saved.get_tensor(f"parameter.{name}"))
            state = {key: saved.get_tensor(f"{key}.{name}") for key in STATE if f"{key}.{name}" in keys}
            if state:
                optimizers[name].state[parameter] = state
    return int(header["step"]), float(header["elapsed_s"])
