"""One training loop: deterministic batches, a warm-up and cosine schedule, checkpoints that resume exactly.

A batch is a pure function of (seed, step), so the data position needs no state. Checkpoints are safetensors
(parameters and what the optimiser keeps of each) beside a JSON header, written atomically; nothing is pickled.
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

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..atomic import new_folder, recover_folder
from ..errors import MoexpError
from .optimizers import STATE, OptimizerName, Optimizers

Metrics = dict[str, float]


@dataclass(frozen=True)
class Schedule:
    """`steps` updates; the learning rate warms up over `warmup` of them and falls by a cosine to `final` of its peak.

    `max_minutes` is a cap for slow machines: training then ends early, with the schedule compressed to the time
    that is left.
    """

    steps: int
    lr: float
    warmup: int = 20
    final: float = 0.05
    max_minutes: float | None = None

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the run that lies behind, by steps or by time, whichever is further."""
        done = step / max(1, self.steps)
        return min(1.0, max(done, elapsed_s / (60 * self.max_minutes)) if self.max_minutes else done)

    def rate(self, step: int, elapsed_s: float) -> float:
        """The learning rate of update `step` (from 0)."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step, elapsed_s)))
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup)) * (self.final + (1 - self.final) * cosine)


def batch_rows(total: int, size: int, step: int, seed: int) -> Tensor:
    """The rows of batch `step`: each epoch is a fresh seeded permutation, the tail of an epoch is dropped."""
    per_epoch = max(1, total // size)
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[place * size : (place + 1) * size]


def train(
    named: dict[str, nn.Parameter],
    schedule: Schedule,
    step_fn: Callable[[int], Metrics],
    *,
    lr_scale: dict[str, float] | None = None,
    optimizer: OptimizerName = "adamw",
    betas: tuple[float, float] = (0.9, 0.95),
    clip: float = 1.0,
    checkpoint: Path | None = None,
    checkpoint_every_s: float = 60.0,
    identity: str = "",
    extra: Mapping[str, Tensor] | None = None,
    after_step: Callable[[int], None] = lambda step: None,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> int:
    """Runs `step_fn` (which computes a loss and calls backward) until the schedule ends; returns the steps taken.

    Args:
        named: the trainable parameters. `lr_scale` multiplies the rate of names that start with a key.
        optimizer: "muon" updates matrices by Muon; `betas` are AdamW's.
        checkpoint: folder to resume from and to write to; `identity` must match the one it was written with.
        extra: tensors that steps change besides the parameters; saved and restored with them.
        after_step: called after each optimiser update; on_step: called with the step's metrics.

    Ctrl-C takes effect at the end of a step, with a checkpoint; a second one takes effect at once, without.

    Raises:
        MoexpError: the checkpoint belongs to another run.
    """
    scales = {name: next((s for key, s in (lr_scale or {}).items() if name.startswith(key)), 1.0) for name in named}
    updates = Optimizers(named, scales, optimizer, betas)
    extra = extra or {}
    step, before_s = (0, 0.0) if checkpoint is None else _resume(checkpoint, updates, extra, identity)
    started = saved = time.monotonic()

    def elapsed_s() -> float:
        return before_s + time.monotonic() - started

    def save() -> None:
        if checkpoint is not None:
            _save(checkpoint, updates, extra, step, elapsed_s(), identity)

    with _interrupt_noted() as interrupted:
        while step < schedule.steps and schedule.progress(step, elapsed_s()) < 1.0:
            rate = schedule.rate(step, elapsed_s())
            metrics = step_fn(step)
            norm = float(nn.utils.clip_grad_norm_(named.values(), clip))
            if math.isfinite(norm):  # a batch that overflows is dropped, not learned from
                updates.step(rate)
            updates.clear()
            after_step(step)
            step += 1
            on_step(step, {**metrics, "lr": rate, "grad_norm": norm, "elapsed_s": elapsed_s()})
            if interrupted():
                save()
                raise KeyboardInterrupt
            if time.monotonic() - saved > checkpoint_every_s:
                save()
                saved = time.monotonic()
    return step


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C is only noted: cut in half, an update would be neither done nor undone."""
    before = signal.getsignal(signal.SIGINT)
    noted = False

    def note(number: int, frame: object) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True
        print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr)

    # Only the main thread may do this, and who runs us in the background may have it ignored.
    mine = threading.current_thread() is threading.main_thread() and callable(before)
    if mine:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def _save(
    folder: Path,
    updates: Optimizers,
    extra: Mapping[str, Tensor],
    step: int,
    elapsed_s: float,
    identity: str,
) -> None:
    tensors: dict[str, Tensor] = {f"extra.{name}": tensor.detach().contiguous() for name, tensor in extra.items()}
    for name, parameter in updates.named.items():
        tensors[f"parameter.{name}"] = parameter.detach().contiguous()
        for key, value in updates.state(name).items():
            tensors[f"{key}.{name}"] = value.contiguous()
    header = {"step": step, "elapsed_s": elapsed_s, "identity": identity}

    with new_folder(folder) as temp:
        save_file(tensors, temp / "state.safetensors")
        (temp / "state.json").write_text(json.dumps(header))


def _resume(
    folder: Path,
    updates: Optimizers,
    extra: Mapping[str, Tensor],
    identity: str,
) -> tuple[int, float]:
    recover_folder(folder)
    if not (folder / "state.json").exists():
        return 0, 0.0
    header = json.loads((folder / "state.json").read_text())
    if header["identity"] != identity:
        raise MoexpError(
            "the checkpoint was written by another run",
            where=str(folder),
            valid=f"identity {identity}, or another --out",
        )
    with safe_open(folder / "state.safetensors", "pt") as saved, torch.no_grad():
        keys = set(saved.keys())
        for name, tensor in extra.items():
            tensor.copy_(saved.get_tensor(f"extra.{name}"))
        for name, parameter in updates.named.items():
            parameter.copy_(saved.get_tensor(f"parameter.{name}"))
            state = {key: saved.get_tensor(f"{key}.{name}") for key in STATE if f"{key}.{name}" in keys}
            if state:
                updates.restore(name, state)
    return int(header["step"]), float(header["elapsed_s"])
