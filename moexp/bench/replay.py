"""What other K, tau, B and prefetches would have done, estimated from one recording: only for choosing what to measure.

Recorded are cycles that drafted the longest block, without truncation, on a resident store: the draft path's routing
and confidences, the target's routing, and how many drafts were accepted. A shorter block from the same position is a
prefix of a longer one, so its drafts, experts and acceptance are known exactly; what is only estimated is its time.
Cycles are weighed alike although another setting would have started its cycles elsewhere.

Shape suffixes: L MoE layers, k top-k, B rows of a verified block.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moexp.bench.jobs import Job
from moexp.runtime.decoding.decode import decode
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Engine
from moexp.runtime.recording.recorder import PassLog
from moexp.runtime.selectors.confidence_expansion import Truncation
from moexp.runtime.verifiers.sampling import Sampling


@dataclass(frozen=True)
class Setting:
    """What `moexp tune` chooses."""

    max_draft: int
    tau: float
    budget: int
    prefetch_top: int | None = None

    @property
    def name(self) -> str:
        prefetch = "" if self.prefetch_top is None else f" P{self.prefetch_top}"
        return f"K{self.max_draft} tau{self.tau:g} B{self.budget}{prefetch}"


@dataclass(frozen=True)
class Cycle:
    """One recorded cycle: layer-expert ids of each draft step (all k, [L, k] by descending gate, and those it ran) and
    of each verified row.
    """

    confidences: list[float]
    predicted: list[np.ndarray]
    drafted: list[frozenset[int]]
    verified: list[frozenset[int]]
    accepted: int


@dataclass(frozen=True)
class Costs:
    """Seconds of a draft step and of verifying a block with every expert resident, and of bringing in one expert."""

    draft_s: float
    verify_s: float
    load_s: float


def record_cycles(
    engine: Engine, jobs: Iterable[Job], method: Method, *, max_new_tokens: int, stop_ids: frozenset[int]
) -> tuple[list[Cycle], Costs]:
    """Decodes the jobs greedily by `method` (fixed K, the longest) and keeps every cycle.

    Returns:
        the cycles, and the times of a draft step and of verification; `load_s` is left at 0.
    """
    cycles: list[Cycle] = []
    draft_s: list[float] = []
    verify_s: list[float] = []
    log = PassLog()
    engine.observe(log)
    for job in jobs:
        running = decode(engine, job.prompt_ids, method, Sampling(), max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        for step in (cycle.record for cycle in running):
            *drafts, verified = [one for one in log.take() if one.phase in ("draft", "verify")]
            verify_s.append(step.verify_s)
            if not drafts:
                continue
            draft_s.append(step.draft_s / len(drafts))
            cycles.append(
                Cycle(
                    confidences=step.confidences,
                    predicted=[_layer_experts(engine, one.routing[:, 0]) for one in drafts],
                    drafted=[_ids(engine, one.routing[:, 0, : one.top_r]) for one in drafts],
                    verified=[_ids(engine, verified.routing[:, row]) for row in range(verified.routing.shape[1])],
                    accepted=step.accepted,
                )
            )
    return cycles, Costs(
        statistics.median(draft_s) if draft_s else 0.0, statistics.median(verify_s) if verify_s else 0.0, 0.0
    )


def estimate(cycles: Iterable[Cycle], setting: Setting, costs: Costs) -> float:
    """Tokens a second of the full method (confidence-expansion, prefetch) with `setting`.

    A cycle takes its draft steps or the loading meanwhile, whichever is longer (they overlap): of what drafting runs,
    and what it predicts as far as that is prefetched, as each router speaks, that of a dropped step too. Then it
    takes the verifier's compute or the loading of what is still missing, whichever is longer.
    """
    tokens, seconds = 0, 0.0
    for cycle in cycles:
        truncation = Truncation("confidence-expansion", setting.tau, setting.budget)
        steps = retained = 0
        offered = min(setting.max_draft, len(cycle.confidences))
        while steps < offered:
            steps += 1
            if not truncation.offer(cycle.confidences[steps - 1], cycle.predicted[steps - 1].ravel().tolist()):
                break
            retained += 1
        announced = (ids_Lk[:, : setting.prefetch_top].ravel().tolist() for ids_Lk in cycle.predicted[:steps])
        early = frozenset().union(*cycle.drafted[:steps], *announced)
        late = frozenset().union(*cycle.verified[: retained + 1]) - early
        tokens += min(cycle.accepted, retained) + 1
        seconds += max(steps * costs.draft_s, len(early) * costs.load_s)
        seconds += max(costs.verify_s, len(late) * costs.load_s)
    return tokens / seconds if seconds else 0.0


def _ids(engine: Engine, routing_Lk: np.ndarray) -> frozenset[int]:
    return frozenset(engine.expert_ids(routing_Lk))


def _layer_experts(engine: Engine, routing_Lk: np.ndarray) -> np.ndarray:
    return np.array(engine.expert_ids(routing_Lk)).reshape(routing_Lk.shape)
