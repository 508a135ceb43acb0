"""One cycle of tree decoding: grow a draft tree, predict its experts, select, prefetch, verify in one step, commit.

The drafter is the target on a cheap path, as for chains. A draft step runs the nodes to expand with their ancestors as
one small tree, so the draft path needs no cache of its own; the experts of nodes that ran before are still held.

Shape suffixes: N nodes, L MoE layers, k top-k, W words of an expert set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moexp.records import StepRecord
from moexp.runtime.decoding.cycle import Prepared
from moexp.runtime.decoding.method import LEARNED, Method
from moexp.runtime.drafters.chain import draft_path, routing_overlap, union_size, until_stop
from moexp.runtime.drafters.head import HeadTreeDrafter
from moexp.runtime.drafters.tree import DraftTree, TreeBuilder, TreeShape
from moexp.runtime.engine.engine import VERIFY, Block, Engine, StepOut
from moexp.runtime.predictors.routing import ExpertPredictor, NoPredictor
from moexp.runtime.selectors.tree import SelectorOptions, Words, make_selector, pack_experts, select
from moexp.runtime.verifiers.chain import Sampler, Sampling
from moexp.runtime.verifiers.tree import verify_tree


class SelfTreeDrafter:
    """Grows trees with an engine's own target on a draft path.

    Args:
        engine: its cache ends before the pending token.
        method: whose drafter, shape and predictor.
    """

    def __init__(self, engine: Engine, method: Method) -> None:
        assert method.tree is not None
        self.engine, self.plan = engine, method.tree
        self.path = draft_path(method.drafter, method.r, prefetch=False)
        self.predicts = self.plan.predictor == "draft-router"

    @property
    def top_r(self) -> int | None:
        """Routed experts that a drafted token uses."""
        return self.path.top_r

    def committed(self, rows: Sequence[int], emitted: Sequence[int]) -> None:
        """Nothing to learn: the target's own cache is all there is."""

    def grow(self, pending: int, steps: int) -> tuple[DraftTree, dict[int, np.ndarray]]:
        """A tree of at most `steps` steps from the pending token.

        Returns:
            the tree, and the draft router's top-k [L, k] for the nodes that were run: all of them, where the plan
            predicts experts, at the price of one more draft step for the leaves.
        """
        shape = self.plan.shape
        builder = TreeBuilder(pending, TreeShape(min(steps, shape.steps), shape.width, shape.beam, shape.pruned))
        routing: dict[int, np.ndarray] = {}
        while not builder.done:
            tree = builder.tree
            logits = self._run(tree, builder.expanded, routing)
            log_probs_FV = torch.stack([logits[node] for node in builder.expanded]).log_softmax(-1)
            best_FC, tokens_FC = log_probs_FV.topk(shape.width, dim=-1)
            builder.extend(tokens_FC.cpu().numpy(), best_FC.double().cpu().numpy())
        tree = builder.tree
        if self.predicts:
            waiting = [node for node in range(len(tree)) if node not in routing]
            while waiting:
                self._run(tree, self._that_fit(tree, waiting), routing)
                waiting = [node for node in waiting if node not in routing]
        return tree, routing

    def _run(self, tree: DraftTree, nodes: Sequence[int], routing: dict[int, np.ndarray]) -> dict[int, Tensor]:
        """Logits of `nodes`, run with their ancestors; the routing of all that ran is added."""
        run = sorted({ancestor for node in nodes for ancestor in tree.path(node)})
        part = tree.take(run)
        out = self.engine.run(Block(part.tokens_N.tolist(), part.parents_N.tolist()), self.path)
        routing.update((node, out.routing_LBk[:, row]) for row, node in enumerate(run))
        return {node: out.logits_BV[row] for row, node in enumerate(run)}

    def _that_fit(self, tree: DraftTree, waiting: Sequence[int]) -> list[int]:
        """As many of the waiting nodes as go into one block with their ancestors."""
        held: set[int] = set()
        chosen: list[int] = []
        for node in waiting:
            with_node = held | set(tree.path(node))
            if len(with_node) <= self.engine.block:
                held, chosen = with_node, [*chosen, node]
        return chosen


@dataclass
class PreparedTree(Prepared):
    """A tree that is ready to be verified.

    Attributes:
        tree: the block's nodes, with probabilities.
        grown: what it was selected from.
        nodes: of the grown tree, in the order of the block.
        costs: layer-experts that each of them added when it was picked; empty without predicted experts.
        unique_draft: layer-experts that drafting touched.
        predict_s: seconds that a predictor of its own took.
        routing: predicted experts [L, k], by row of the block.
        covered_LW: experts that are covered with it, for the next request of a batch.
    """

    tree: DraftTree
    grown: DraftTree
    nodes: list[int]
    costs: dict[int, int]
    unique_draft: int
    predict_s: float | None
    routing: dict[int, np.ndarray]
    covered_LW: Words | None


@dataclass(frozen=True)
class TreeCycle:
    """A cycle's tree, to be shown.

    Attributes:
        tree: all that was drafted.
        chosen: nodes that were verified.
        costs: layer-experts that each added when it was picked; empty without predicted experts.
        accepted: the path that stands, its root included.
    """

    tree: DraftTree
    chosen: Sequence[int]
    costs: Mapping[int, int]
    accepted: Sequence[int]


class TreeLoop:
    """The tree counterpart of the chain's loop: cycle after cycle on one request."""

    path = VERIFY

    def __init__(
        self,
        engine: Engine,
        method: Method,
        sampling: Sampling,
        stop_ids: frozenset[int],
        prompt_ids: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        assert method.tree is not None
        self.engine, self.method, self.sampling, self.stop_ids = engine, method, sampling, stop_ids
        self.on_tree: Callable[[TreeCycle], None] | None = None
        self.plan = method.tree
        self.sampler = Sampler(sampling.seed)
        self.drafter: SelfTreeDrafter | HeadTreeDrafter
        if method.drafter == "head":
            self.drafter = HeadTreeDrafter(engine, self.plan.shape, prompt_ids)
        else:
            self.drafter = SelfTreeDrafter(engine, method)
        self.predictor: ExpertPredictor = engine.predictors.get(self.plan.predictor, NoPredictor)()
        self.predictor.begin(prompt_ids, max_new_tokens)
        self.selector = make_selector(
            self.plan.selector,
            SelectorOptions(self.plan.epsilon, method.tau, None if method.budget == "cache" else method.budget),
        )

    def prepare(self, pending: int, room: int, covered_LW: Words | None = None) -> PreparedTree:
        """See `Loop`: grow, select and announce a tree.

        Args:
            covered_LW: experts that cost nothing, for those of the batch's requests before this one are loaded anyway.
        """
        engine = self.engine
        begin_s = time.perf_counter()
        base = engine.length
        tree, routing = self._grow(pending, room - 1)
        engine.rollback(base)
        unique_draft = self._unique_draft(routing)
        grown_s = time.perf_counter()
        predicted = self.predictor.predict(tree)
        predict_s = None if predicted is None else time.perf_counter() - grown_s
        if predicted is not None:
            # Where the draft path went, its router knows better than a model that reads tokens alone.
            ran = routing if self.plan.predictor.startswith(LEARNED) else {}
            routing = dict(enumerate(predicted)) | ran
        nodes, costs, covered_LW = self._select(tree, routing, covered_LW)
        block = tree.take(nodes)
        if self.method.prefetch:
            for node in nodes:
                if node in routing:
                    engine.prefetch(routing[node], self.method.prefetch_top)
        kept = {row: routing[node] for row, node in enumerate(nodes) if node in routing}
        return PreparedTree(
            Block(block.tokens_N.tolist(), block.parents_N.tolist()),
            begin_s,
            time.perf_counter(),
            tree=block,
            grown=tree,
            nodes=nodes,
            costs=costs,
            unique_draft=unique_draft,
            predict_s=predict_s,
            routing=kept,
            covered_LW=covered_LW,
        )

    def finish(self, prepared: Prepared, out: StepOut, request: int, number: int) -> tuple[StepRecord, Tensor]:
        """See `Loop`."""
        assert isinstance(prepared, PreparedTree)
        engine, tree = self.engine, prepared.tree
        verdict = verify_tree(tree, out.logits_BV, self.sampling, self.sampler)
        verified_s = time.perf_counter()
        emitted = until_stop(self.stop_ids, verdict.tokens(tree))
        kept = list(verdict.path[: len(emitted)])
        engine.commit(kept)  # the last emitted token is pending: it has no keys and values yet
        self.drafter.committed(kept, emitted)
        self.predictor.commit(emitted)
        end_s = time.perf_counter()
        if self.on_tree is not None:
            self.on_tree(
                TreeCycle(prepared.grown, prepared.nodes, prepared.costs, [prepared.nodes[row] for row in kept])
            )
        overlap, slots = None, None
        if prepared.routing:
            drafted = np.stack(list(prepared.routing.values()), axis=1)
            overlap, slots = routing_overlap(drafted, out.routing_LBk[:, list(prepared.routing)])
        record = StepRecord(
            request=request,
            cycle=number,
            method=self.method.label,
            drafted=len(tree) - 1,
            accepted=min(verdict.accepted, len(emitted)),
            emitted=len(emitted),
            tokens=emitted,
            confidences=tree.path_probs_N[1:].tolist(),
            unique_draft=prepared.unique_draft,
            unique_verify=union_size(out.routing_LBk, engine.spec.num_experts),
            union_layers=len(engine.spec.moe_layers),
            router_overlap=overlap,
            router_slots=slots,
            tree_nodes=len(prepared.grown),
            draft_s=prepared.drafted_s - prepared.begin_s - (prepared.predict_s or 0.0),
            predict_s=prepared.predict_s,
            verify_s=verified_s - prepared.drafted_s,
            cycle_s=end_s - prepared.begin_s,
        )
        return record, out.logits_BV[kept]

    def _grow(self, pending: int, steps: int) -> tuple[DraftTree, dict[int, np.ndarray]]:
        if steps < 1:
            return DraftTree.chain(pending, [], []), {}
        return self.drafter.grow(pending, steps)

    def _select(
        self, tree: DraftTree, routing: dict[int, np.ndarray], covered_LW: Words | None
    ) -> tuple[list[int], dict[int, int], Words | None]:
        """Nodes to verify, the root first, likelier children first; what each costs; and the experts that are covered
        with them.
        """
        words_NLW: Words | None = None
        if len(routing) == len(tree):
            ids_NLk = np.stack([routing[node] for node in range(len(tree))]).astype(np.int64)
            words_NLW = pack_experts(ids_NLk, self.engine.spec.num_experts)
        elif len(tree) == 1:
            return [0], {}, covered_LW
        chosen = select(self.selector, tree, self.plan.gamma, words_NLW, covered_LW)
        costs = {} if chosen.costs is None else dict(zip(chosen.nodes, chosen.costs, strict=True))
        return tree.depth_first(chosen.nodes), costs, chosen.covered_LW if chosen.costs is not None else covered_LW

    def _unique_draft(self, routing: dict[int, np.ndarray]) -> int:
        if not routing:
            return 0
        used = np.stack(list(routing.values()), axis=1)[..., : self.drafter.top_r]
        return union_size(used, self.engine.spec.num_experts)
