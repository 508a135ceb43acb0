"""Engines over tiny targets, and stores that watch or disturb, for the runtime's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moexp.runtime.decoding.cycle import Cycle
from moexp.runtime.engine.engine import Engine
from moexp.runtime.store.counters import Phase
from moexp.runtime.store.host import load_experts
from moexp.runtime.store.opening import open_store
from moexp.runtime.store.store import ExpertStore, ResidentStore, Ticket
from moexp.target.experts import ExpertKey, ExpertWeights
from moexp.target.load import load_target


def make_engine(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    """An engine over a resident store."""
    target = load_target(folder, dtype=dtype)
    store = options.pop("store", None) or open_store(target.index, "resident", dtype=dtype)
    options.setdefault("draft_experts", StandInDrafts(target.spec.hidden_size, target.spec.moe_layers, dtype))
    options.setdefault("prefill_rows", 32)
    return Engine(target, store, **options)


class StandInDrafts(nn.Module):
    """Small random draft experts."""

    def __init__(self, hidden: int, layers: tuple[int, ...], dtype: torch.dtype, width: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        shape = (max(layers) + 1, hidden, width)
        self.up = torch.randn(shape, generator=generator).mul_(0.1).to(dtype)
        self.down = torch.randn(shape, generator=generator).mul_(0.1).to(dtype)

    def forward_layer(self, layer: int, x_TH: Tensor) -> Tensor:
        return torch.tanh(x_TH @ self.up[layer]) @ self.down[layer].t()


class WatchedStore(ResidentStore):
    """A resident store that logs its calls and yields experts in a shuffled order."""

    def __init__(self, weights: dict[ExpertKey, ExpertWeights], seed: int = 0) -> None:
        super().__init__(weights)
        self.calls: list[tuple[str, Any]] = []
        self.open_tickets = 0
        self._random = random.Random(seed)

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> WatchedStore:
        return cls(load_experts(load_target(folder, dtype=dtype).index, dtype), seed)

    def begin_cycle(self) -> None:
        self.calls.append(("begin_cycle", None))

    def prefetch(self, keys: Iterable[ExpertKey]) -> int:
        keys = list(keys)
        self.calls.append(("prefetch", keys))
        return len(keys)

    def request(self, keys: Sequence[ExpertKey], phase: Phase) -> Ticket:
        assert len(set(keys)) == len(keys), "an expert was requested twice"
        self.calls.append((phase, list(keys)))
        self.open_tickets += 1
        return super().request(keys, phase)

    def arrivals(self, ticket: Ticket) -> Iterator[tuple[ExpertKey, ExpertWeights]]:
        arriving = list(super().arrivals(ticket))
        self._random.shuffle(arriving)
        yield from arriving

    def release(self, ticket: Ticket) -> None:
        self.open_tickets -= 1
        super().release(ticket)

    def requested(self, phase: Phase) -> list[list[ExpertKey]]:
        """Keys of each request of a phase."""
        return [keys for kind, keys in self.calls if kind == phase]

    def prefetched(self) -> list[list[ExpertKey]]:
        """Keys of each prefetch."""
        return [keys for kind, keys in self.calls if kind == "prefetch"]


def swap_store(engine: Engine, store: ExpertStore) -> ExpertStore:
    """Give the engine another store; returns the one it had."""
    engine.store, before = store, engine.store
    return before


def prompt(length: int, seed: int = 0, vocab: int = 240) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def logits_to(rows: list[torch.Tensor]) -> Callable[[Cycle], None]:
    """For `decode_all`: keeps the logits of emitted positions."""
    return lambda cycle: rows.append(cycle.logits_BV)
