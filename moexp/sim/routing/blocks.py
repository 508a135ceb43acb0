"""Drafted blocks whose outcome is known, and the cycles of other settings cut from them.

A block is a cycle that drafted to the full length without truncation. A shorter one from the same position is its
prefix, so its drafts, experts and acceptance are known exactly. Cycles are weighed alike although another setting would
have started its cycles elsewhere.

Shapes: L MoE layers, B rows of a block, k experts a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from moexp.base.errors import MoexpError
from moexp.data.traces import RoutingGeometry
from moexp.runtime.recording.files import RecordedCycle, Recording
from moexp.runtime.selectors.confidence_expansion import Truncation
from moexp.runtime.store.counters import Phase
from moexp.sim.machine.cycles import Announcement, Cycle, Step, Table, announcement, key_table, routed_step

if TYPE_CHECKING:
    from moexp.target.experts import ExpertKey


@dataclass(frozen=True)
class Setting:
    """How a block is drafted and verified; the names are those of `moexp.runtime.decoding.method.Method`."""

    max_draft: int = 4
    policy: str = "fixed"
    tau: float = 0.5
    budget: int | str = 60
    prefetch: bool = False
    prefetch_top: int | None = None
    prefetch_inline: bool = True


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        confidences: of each drafted token.
        drafted_LKk: routing of the draft steps.
        verified_LBk: routing of the verified rows, B = K + 1.
        accepted, emitted: of the whole block; a stop token may end it sooner.
    """

    confidences: tuple[float, ...]
    drafted_LKk: np.ndarray
    verified_LBk: np.ndarray
    accepted: int
    emitted: int


class Blocks:
    """Blocks of one drafter, ready to be cut to any setting; each step is built once.

    Args:
        blocks: in order.
        geometry: of the recorded model.
        top_r: routed experts that a draft step runs; None: all.
        draft_experts: whether it runs draft experts.
        layers: MoE layers to simulate; None: as recorded. Recorded ones are used in turn (priced for another model).

    Raises:
        MoexpError: no blocks.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        geometry: RoutingGeometry,
        *,
        top_r: int | None,
        draft_experts: bool,
        layers: int | None = None,
    ) -> None:
        if not blocks:
            raise MoexpError("no cycles to simulate", valid="a recording of requests, or a trace")
        self.top_r, self.draft_experts = top_r, draft_experts
        self.longest = max(len(block.confidences) for block in blocks)
        numbers = geometry.layers if layers is None else range(layers)
        self.moe_layers = len(numbers)
        self.table: Table = key_table(numbers, geometry.num_experts)
        self._turns = np.arange(self.moe_layers) % len(geometry.layers)
        self._offsets_L1 = np.arange(self.moe_layers)[:, None] * geometry.num_experts
        self._blocks = list(blocks)
        self._draft, self._verify, self._ids = cache(self._draft_step), cache(self._verify_step), cache(self._draft_ids)

    def ar(self) -> list[Cycle]:
        """The emitted text token by token."""
        return [
            Cycle([self._verify(number, row, row + 1, "ar")], 1)
            for number, block in enumerate(self._blocks)
            for row in range(block.emitted)
        ]

    def cycles(self, setting: Setting, capacity: int | None = None) -> list[Cycle]:
        """The cycles that a setting makes of the blocks.

        Args:
            capacity: of the expert cache, for the budget "cache".

        Raises:
            MoexpError: longer blocks than there are, or an unknown policy.
        """
        if setting.max_draft > self.longest:
            raise MoexpError(f"K = {setting.max_draft}", where="max_draft", valid=f"1 to {self.longest}, as recorded")
        return [self._cut(number, setting, capacity) for number in range(len(self._blocks))]

    def demands(self) -> dict[ExpertKey, float]:
        """How often each expert is used by the emitted text: a histogram for the policy "static-hot"."""
        steps = (step for cycle in self.ar() for step in cycle.steps())
        counts = Counter(key for step in steps for keys in step.demands for key in keys)
        return {key: float(count) for key, count in counts.items()}

    def _cut(self, number: int, setting: Setting, capacity: int | None) -> Cycle:
        block = self._blocks[number]
        budget = None if setting.budget == "cache" else int(setting.budget)
        truncation = Truncation(setting.policy, setting.tau, budget, capacity)
        inline = setting.prefetch and setting.prefetch_inline
        events: list[Step | Announcement] = []
        drafted = 0
        for row in range(min(setting.max_draft, len(block.confidences))):
            events.append(self._draft(number, row, inline, setting.prefetch_top))
            if setting.policy != "fixed" and not truncation.offer(block.confidences[row], self._ids(number, row)):
                break
            drafted += 1
            if setting.prefetch and not inline:
                routing_Lk = block.drafted_LKk[self._turns, row, : setting.prefetch_top]
                events.append(announcement(self.table, routing_Lk))
        events.append(self._verify(number, 0, drafted + 1, "verify"))
        return Cycle(events, min(block.emitted, min(block.accepted, drafted) + 1))

    def _draft_step(self, number: int, row: int, prefetch: bool, top: int | None) -> Step:
        return routed_step(
            self.table,
            self._blocks[number].drafted_LKk[self._turns, row : row + 1],
            "draft",
            top_r=self.top_r,
            draft_experts=self.draft_experts,
            prefetch=prefetch,
            prefetch_top=top,
        )

    def _verify_step(self, number: int, first: int, end: int, phase: Phase) -> Step:
        return routed_step(self.table, self._blocks[number].verified_LBk[self._turns, first:end], phase)

    def _draft_ids(self, number: int, row: int) -> list[int]:
        """The layer-experts of a draft, each as one number."""
        routing_Lk = self._blocks[number].drafted_LKk[self._turns, row]
        return (routing_Lk + self._offsets_L1).ravel().tolist()


def recorded_blocks(recording: Recording, method: str, layers: int | None = None) -> Blocks:
    """The blocks of a recorded method that drafts chains of fixed length.

    Args:
        layers: see `Blocks`.

    Raises:
        MoexpError: no such method, or one that truncates, drafts trees or is AR.
    """
    settings = recording.info.methods.get(method)
    usable = fixed_methods(recording)
    if settings is None or method not in usable:
        raise MoexpError(f"no blocks of full length by {method!r}", valid=", ".join(usable) or "a method of fixed K")
    blocks = [_block(cycle) for cycle in recording.of_method(method)]
    draft_experts = settings["drafter"] == "draft-expert"
    top_r = None if settings["drafter"] == "target" else settings["r"]
    return Blocks(blocks, recording.info.geometry, top_r=top_r, draft_experts=draft_experts, layers=layers)


def fixed_methods(recording: Recording) -> list[str]:
    """Recorded methods that can be cut: chains of fixed length."""
    return [
        label
        for label, method in recording.info.methods.items()
        if method["drafter"] not in ("ar", "head") and method["policy"] == "fixed" and method["tree"] is None
    ]


def _block(cycle: RecordedCycle) -> Block:
    drafts = [(one.confidence, one.routing[:, 0]) for one in cycle.drafts if one.confidence is not None]
    verified_LBk = cycle.passes[-1].routing
    drafted_LKk = np.stack([routing for _, routing in drafts], axis=1) if drafts else verified_LBk[:, :0]
    confidences = tuple(confidence for confidence, _ in drafts)
    return Block(confidences, drafted_LKk, verified_LBk, cycle.accepted, cycle.emitted)
