"""One cycle: propose, predict, select, prefetch, verify, commit; and what is recorded of it.

Requests of a batch run in lockstep: each drafts by itself, then one step verifies them all over the union of their
experts. A request's rows run in the same kernels as alone (`Engine.step_batch`), so its output is its batch-1 output to
the bit; what a batch shares is the loading of experts. Requests that end early leave the batch.

Shape suffixes: B rows of a block, L MoE layers, k top-k, V vocabulary, W words of an expert set.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decoding.method import Method
from moexp.runtime.decoding.speculation import Proposal, Request, SelectedTree, Speculation
from moexp.runtime.engine.engine import Engine, RequestState, StepOut
from moexp.runtime.selectors.expert_sets import Words
from moexp.runtime.verifiers.chain import Verdict


@dataclass(frozen=True)
class Cycle:
    """A cycle of one request.

    Attributes:
        record: what is recorded of it.
        logits_BV: fp32, of the positions that it emitted.
        rows: of the block, those that stand.
        tree: the draft tree, of a method that drafts trees.
    """

    record: StepRecord
    logits_BV: Tensor
    rows: list[int]
    tree: SelectedTree | None = None


@dataclass
class Answer:
    """A request while it is decoded.

    Attributes:
        state: of the engine.
        speculation: the method at work on it.
        finish: why the answer ended; "" while it goes on.
    """

    request: Request
    method: Method
    state: RequestState
    speculation: Speculation
    prefill_s: float = 0.0
    cycles: int = 0
    tokens: list[int] = field(default_factory=list)
    decode_s: float = 0.0
    finish: str = ""

    @property
    def pending(self) -> int:
        """The last token; it has no keys and values yet."""
        return self.tokens[-1] if self.tokens else self.request.prompt_ids[-1]

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - len(self.tokens)

    def emit(self, tokens: Sequence[int], cycle_s: float) -> None:
        """Add a cycle's tokens."""
        self.tokens += tokens
        self.cycles += 1
        self.decode_s += cycle_s
        if self.pending in self.request.stop_ids:
            self.finish = "stop"
        elif not self.room:
            self.finish = "length"

    def record(self) -> RequestRecord:
        return RequestRecord(
            request=self.request.number,
            workload=self.request.workload,
            method=self.method.label,
            prompt_tokens=len(self.request.prompt_ids),
            new_tokens=len(self.tokens),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            finish_reason=self.finish,
            tokens=self.tokens,
        )


@dataclass(frozen=True)
class _Shared:
    """What the requests of a cycle have in common; see `StepRecord`."""

    batch: int | None
    unique_verify: int
    draft_s: float
    predict_s: float
    verify_s: float
    cycle_s: float
    store: dict[str, float]


def run_cycle(engine: Engine, answers: Sequence[Answer], batch: int | None = None) -> list[Cycle]:
    """One cycle of requests that are decoded by the same method.

    Args:
        batch: their number, for the records; None: one request that is decoded alone.
    """
    store = engine.store
    before = store.counters.snapshot()
    store.begin_cycle()
    begin_s = time.perf_counter()
    proposals: list[Proposal] = []
    bases: list[int] = []
    covered_LW: Words | None = None
    for answer in answers:
        engine.activate(answer.state)
        bases.append(engine.length)
        proposals.append(answer.speculation.propose(answer.pending, answer.room, covered_LW))
        covered_LW = proposals[-1].covered_LW
    drafted_s = time.perf_counter()
    path = answers[0].speculation.path
    outs = engine.step_batch([proposal.block for proposal in proposals], [answer.state for answer in answers], path)
    verdicts = [proposal.verify(out.logits_BV) for proposal, out in zip(proposals, outs, strict=True)]
    verified_s = time.perf_counter()
    emitted = []
    for answer, base, proposal, verdict in zip(answers, bases, proposals, verdicts, strict=True):
        engine.activate(answer.state)
        emitted.append(tokens := until_stop(answer.request.stop_ids, verdict.tokens(proposal.block.ids)))
        answer.speculation.commit(base, verdict.path[: len(tokens)], tokens)
    end_s = time.perf_counter()
    predict_s = sum(proposal.predict_s or 0.0 for proposal in proposals)
    shared = _Shared(
        batch=batch,
        unique_verify=union_size([out.routing_LBk for out in outs], engine.spec.num_experts),
        draft_s=drafted_s - begin_s - predict_s,
        predict_s=predict_s,
        verify_s=verified_s - drafted_s,
        cycle_s=end_s - begin_s,
        store=(store.counters - before).as_dict(),
    )
    return [_finish(engine, *one, shared) for one in zip(answers, proposals, outs, verdicts, emitted, strict=True)]


def _finish(
    engine: Engine,
    answer: Answer,
    proposal: Proposal,
    out: StepOut,
    verdict: Verdict,
    tokens: list[int],
    shared: _Shared,
) -> Cycle:
    """Adds the cycle's tokens to the answer, and records it."""
    overlap, slots = None, None
    if proposal.predicted:
        predicted_LBk = np.stack(list(proposal.predicted.values()), axis=1)
        overlap, slots = routing_overlap(predicted_LBk, out.routing_LBk[:, list(proposal.predicted)])
    record = StepRecord(
        request=answer.request.number,
        cycle=answer.cycles,
        method=answer.method.label,
        drafted=len(proposal.confidences),
        accepted=min(verdict.accepted, len(tokens)),
        emitted=len(tokens),
        tokens=tokens,
        confidences=proposal.confidences,
        unique_draft=None if proposal.ran is None else union_size(proposal.ran, engine.spec.num_experts),
        unique_verify=shared.unique_verify,
        union_layers=len(engine.spec.moe_layers),
        router_overlap=overlap,
        router_slots=slots,
        tree_nodes=None if proposal.tree is None else len(proposal.tree.tree),
        batch=shared.batch,
        draft_s=shared.draft_s,
        predict_s=None if proposal.predict_s is None else shared.predict_s,
        verify_s=shared.verify_s,
        cycle_s=shared.cycle_s,
        store=shared.store,
    )
    answer.emit(tokens, shared.cycle_s)
    rows = list(verdict.path[: len(tokens)])
    return Cycle(record, out.logits_BV[rows], rows, proposal.tree)


def until_stop(stop_ids: Collection[int], tokens: list[int]) -> list[int]:
    """The tokens up to the first that ends the answer, it included."""
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1]
    return tokens


def routing_overlap(predicted_LBk: np.ndarray, routed_LBk: np.ndarray) -> tuple[int, int]:
    """Experts that predictions and routing have in common over all layers and rows.

    Returns:
        (overlap, slots), slots = L B k.
    """
    same = predicted_LBk[..., :, None] == routed_LBk[..., None, :]
    return int(same.sum()), routed_LBk.size


def union_size(routings: Sequence[np.ndarray], num_experts: int) -> int:
    """Layer-experts in the union of routings [L, ...]: the sum over layers of distinct ids."""
    if not routings:
        return 0
    seen = np.zeros((len(routings[0]), num_experts), dtype=bool)
    layers_L1 = np.arange(len(seen))[:, None]
    for routing in routings:
        seen[layers_L1, routing.reshape(len(seen), -1)] = True
    return int(seen.sum())
