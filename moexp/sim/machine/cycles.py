"""What a simulated machine walks through: cycles of steps, as layer-by-layer lists of keys.

Pure data, prepared once and walked under every setting. Shapes: L MoE layers, B rows, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moexp.runtime.recording.files import PREFETCH, RecordedCycle
from moexp.runtime.store.counters import Phase

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey

Keys = list["ExpertKey"]
Table = Sequence[Sequence["ExpertKey"]]
"""Keys by index of the MoE layer and expert: one tuple each, which all steps share."""


def key_table(layers: Iterable[int], num_experts: int) -> Table:
    """The table of decoder layers `layers`."""
    return [[(layer, expert) for expert in range(num_experts)] for layer in layers]


@dataclass
class Step:
    """One step through the layers.

    Attributes:
        demands: keys that each MoE layer demands, in the order of `moexp.runtime.engine.moe.MoELayer`.
        beyond: keys that each layer announces once it has demanded; None: nothing.
        chosen: experts that all rows together choose in a layer.
    """

    phase: Phase
    rows: int
    draft_experts: bool
    chosen: int
    demands: list[Keys]
    beyond: list[Keys] | None = None


@dataclass
class Announcement:
    """A prefetch outside of a step."""

    keys: Keys


@dataclass
class Cycle:
    """Begin-cycle, then its events. `emitted` tokens come of it (0: a prefill chunk)."""

    events: list[Step | Announcement] = field(default_factory=list)
    emitted: int = 0

    def steps(self) -> Iterator[Step]:
        """The events that are steps."""
        return (event for event in self.events if isinstance(event, Step))


def routed_step(
    table: Table,
    routing_LBk: np.ndarray,
    phase: Phase,
    *,
    top_r: int | None = None,
    draft_experts: bool = False,
    prefetch: bool = False,
    prefetch_top: int | None = None,
) -> Step:
    """A step by `moexp.runtime.engine.moe.StepPath`'s rules.

    Args:
        routing_LBk: the routers' top-k of each row, by descending gate.
    """
    beyond = None
    if prefetch and top_r is not None and routing_LBk[:, :, top_r:prefetch_top].shape[2]:
        beyond = unions(table, routing_LBk[:, :, top_r:prefetch_top])
    used_LBr = routing_LBk[:, :, :top_r]
    rows, width = used_LBr.shape[1:]
    return Step(phase, rows, draft_experts, rows * width, unions(table, used_LBr), beyond)


def unions(table: Table, ids_LBr: np.ndarray) -> list[Keys]:
    """Each layer's distinct keys, in the runtime's order: one row's by descending gate, several rows' by id."""
    if ids_LBr.shape[1] == 1:
        return [[keys[expert] for expert in row] for keys, row in zip(table, ids_LBr[:, 0].tolist(), strict=True)]
    flat = ids_LBr.reshape(len(ids_LBr), -1).tolist()
    return [[keys[expert] for expert in sorted(set(ids))] for keys, ids in zip(table, flat, strict=True)]


def announcement(table: Table, routing_Lk: np.ndarray) -> Announcement:
    """The experts of one token over all layers (`moexp.runtime.engine.engine.Engine.prefetch`)."""
    rows = routing_Lk.tolist()
    return Announcement([keys[expert] for keys, row in zip(table, rows, strict=True) for expert in row])


def recorded_cycle(table: Table, recorded: RecordedCycle) -> Cycle:
    """A recorded cycle, exactly as its run put it to the store."""
    events: list[Step | Announcement] = []
    for one in recorded.passes:
        if one.phase == PREFETCH:
            events.append(announcement(table, one.routing[:, 0]))
        else:
            step = routed_step(
                table,
                one.routing,
                one.phase,  # type: ignore[arg-type]
                top_r=one.top_r,
                draft_experts=one.draft_experts,
                prefetch=one.prefetch,
                prefetch_top=one.prefetch_top,
            )
            events.append(step)
    return Cycle(events, recorded.emitted)
