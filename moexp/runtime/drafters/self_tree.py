"""Self-drafting of trees: the target itself on a cheaper path through its MoE layers.

A draft step runs the nodes to expand with their ancestors as one small tree, so the draft path needs no cache of its
own; the experts of nodes that ran before are still in the store.

Shape suffixes: N nodes, L MoE layers, k top-k, F nodes that a step expands, C candidates of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from moexp.runtime.drafters.draft_tree import DraftTree, TreeBuilder, TreeShape
from moexp.runtime.engine.engine import Block, Engine
from moexp.runtime.engine.moe import StepPath

NodeRouting = dict[int, np.ndarray]
"""Routing [L, k] of a tree's nodes, by descending gate."""


class SelfTreeDrafter:
    """Grows trees with an engine's own target.

    Args:
        engine: its cache ends before the pending token.
        path: one of `moexp.runtime.drafters.self_chain.DRAFTERS`.
        shape: of the trees.

    Paper: DraftExpert eq. 5.
    """

    def __init__(self, engine: Engine, path: StepPath, shape: TreeShape) -> None:
        self.engine, self.path, self.shape = engine, path, shape

    @property
    def top_r(self) -> int | None:
        """Routed experts that a drafted token uses."""
        return self.path.top_r

    def grow(self, pending: int, limit: int) -> tuple[DraftTree, NodeRouting]:
        """A tree of at most `limit` steps from the pending token, and the draft router's top-k for the nodes that ran:
        all but the last step's.
        """
        builder = TreeBuilder(pending, self.shape, limit)
        routing: NodeRouting = {}
        while not builder.done:
            logits = run_nodes(self.engine, self.path, builder.tree, builder.expanded, routing)
            log_probs_FV = torch.stack([logits[node] for node in builder.expanded]).log_softmax(-1)
            best_FC, tokens_FC = log_probs_FV.topk(self.shape.width, dim=-1)
            builder.extend(tokens_FC.cpu().numpy(), best_FC.double().cpu().numpy())
        return builder.tree, routing

    def commit(self, rows: Sequence[int], emitted: Sequence[int]) -> None:
        """Nothing to do: the drafter has no state but the target's own cache."""


def run_nodes(
    engine: Engine, path: StepPath, tree: DraftTree, nodes: Collection[int], routing: NodeRouting
) -> dict[int, Tensor]:
    """Runs nodes with their ancestors as one block.

    Args:
        nodes: with their ancestors, as many as fit into a block at most.
        routing: extended by all nodes that ran.

    Returns:
        fp32 logits [V] of all nodes that ran.
    """
    run = sorted({ancestor for node in nodes for ancestor in tree.path(node)})
    part = tree.take(run)
    out = engine.run(Block(part.tokens_N.tolist(), part.parents_N.tolist()), path)
    routing.update((node, out.routing_LBk[:, row]) for row, node in enumerate(run))
    return {node: out.logits_BV[row] for row, node in enumerate(run)}
