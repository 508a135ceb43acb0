"""A draft tree in a cycle of one request: grow it, predict its experts, select, prefetch, verify in one step.

Shape suffixes: N nodes, L MoE layers, k top-k, W words of an expert set.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from moexp.runtime.decoding.method import DRAFT_ROUTER, HEAD, LEARNED, Method
from moexp.runtime.decoding.speculation import Proposal, Request, SelectedTree
from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.drafters.head_tree import HeadTreeDrafter
from moexp.runtime.drafters.self_chain import DRAFTERS
from moexp.runtime.drafters.self_tree import NodeRouting, SelfTreeDrafter
from moexp.runtime.engine.engine import VERIFY, Block, Engine
from moexp.runtime.predictors.draft_router import route_leaves
from moexp.runtime.selectors.expert_sets import Words, pack_experts
from moexp.runtime.selectors.registry import SelectorOptions, make_selector
from moexp.runtime.selectors.selector import select
from moexp.runtime.verifiers.sampling import Sampler, Sampling
from moexp.runtime.verifiers.tree import verify_tree


class TreeSpeculation:
    """A draft tree a cycle on one request, whose prompt is prefilled but for the last token."""

    path = VERIFY

    def __init__(self, engine: Engine, method: Method, sampling: Sampling, sampler: Sampler, request: Request) -> None:
        assert method.tree is not None
        self.engine, self.method, self.sampling, self.sampler = engine, method, sampling, sampler
        self.plan = plan = method.tree
        self.drafter: SelfTreeDrafter | HeadTreeDrafter
        if method.drafter == HEAD:
            self.drafter = HeadTreeDrafter(engine, plan.shape, request.prompt_ids)
        else:
            self.drafter = SelfTreeDrafter(engine, DRAFTERS[method.drafter](method.r), plan.shape)
        make_predictor = engine.predictors.get(plan.predictor)
        self.predictor = None if make_predictor is None else make_predictor()
        if self.predictor is not None:
            self.predictor.begin(request.prompt_ids, request.max_new_tokens)
        budget = None if method.budget == "cache" else method.budget
        self.selector = make_selector(plan.selector, SelectorOptions(plan.epsilon, method.tau, budget))

    def propose(self, pending: int, room: int, covered_LW: Words | None) -> Proposal:
        """See `Speculation`."""
        tree, routing = self._grow(pending, room - 1)
        ran = [routing_Lk[:, : self.drafter.top_r] for routing_Lk in routing.values()]
        predict_s = None
        if self.predictor is not None:
            begin_s = time.perf_counter()
            predicted = self.predictor.predict(tree)
            predict_s = time.perf_counter() - begin_s
            # Where the draft path went, its router knows better than a model that reads tokens alone.
            better = routing if self.plan.predictor.startswith(LEARNED) else {}
            routing = dict(enumerate(predicted)) | better
        nodes, costs, covered_LW = self._select(tree, routing, covered_LW)
        block = tree.take(nodes)
        if self.method.prefetch:
            for node in nodes:
                if node in routing:
                    self.engine.prefetch(routing[node], self.method.prefetch_top)
        return Proposal(
            block=Block(block.tokens_N.tolist(), block.parents_N.tolist()),
            confidences=block.path_probs_N[1:].tolist(),
            verify=lambda logits_BV: verify_tree(block, logits_BV, self.sampling, self.sampler),
            ran=ran,
            predicted={row: routing[node] for row, node in enumerate(nodes) if node in routing},
            predict_s=predict_s,
            tree=SelectedTree(tree, nodes, costs),
            covered_LW=covered_LW,
        )

    def commit(self, base: int, rows: Sequence[int], emitted: Sequence[int]) -> None:
        """See `Speculation`."""
        self.engine.commit(rows)
        self.drafter.commit(rows, emitted)
        if self.predictor is not None:
            self.predictor.commit(emitted)

    def _grow(self, pending: int, limit: int) -> tuple[DraftTree, NodeRouting]:
        """A tree, and the draft path's routing of the nodes that ran."""
        if limit < 1:
            return DraftTree.chain(pending, [], []), {}
        tree, routing = self.drafter.grow(pending, limit)
        if isinstance(self.drafter, SelfTreeDrafter) and self.plan.predictor == DRAFT_ROUTER:
            route_leaves(self.engine, self.drafter.path, tree, routing)
        return tree, routing

    def _select(
        self, tree: DraftTree, routing: NodeRouting, covered_LW: Words | None
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
        selection = select(self.selector, tree, self.plan.gamma, words_NLW, covered_LW)
        nodes = tree.depth_first(selection.nodes)
        if selection.costs is None:
            return nodes, {}, covered_LW
        return nodes, dict(zip(selection.nodes, selection.costs, strict=True)), selection.covered_LW
