"""Draft trees from a head on the target's hidden states: EAGLE-3, MTP, or a GTO-trained head.

Pair t of the head is the target's state at position t and the token at t + 1 (`moexp.target.heads`). True pairs stay
in the head's cache for the request; those of a tree, made of the head's own states, are forgotten after each
cycle. The head is resident, so drafting demands no routed expert at all.

Shape suffixes: F width of what a head reads of the target, H width of the head, T pairs of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moexp.runtime.drafters.draft_tree import DraftTree, TreeBuilder, TreeShape
from moexp.runtime.drafters.self_tree import NodeRouting
from moexp.runtime.engine.engine import Engine
from moexp.target.heads.head import HeadCache


class HeadTreeDrafter:
    """Grows trees with an engine's draft head.

    Args:
        engine: with a draft head; a prompt has been prefilled.
        shape: of the trees.
        prompt_ids: the prompt, its pending last token included.
    """

    top_r = 0  # routed experts that a drafted token uses

    def __init__(self, engine: Engine, shape: TreeShape, prompt_ids: Sequence[int]) -> None:
        assert engine.draft_head is not None
        self.engine, self.head, self.shape = engine, engine.draft_head, shape
        self.cache = HeadCache()
        self._root_H: Tensor | None = None
        states_PF = engine.take_features()
        if states_PF is not None:
            self._extend(states_PF, prompt_ids[1:])

    @torch.no_grad()
    def grow(self, pending: int, limit: int) -> tuple[DraftTree, NodeRouting]:
        """A tree of at most `limit` steps; a head predicts no routing. Without any true pair (a prompt of one token)
        the tree is its root.
        """
        if self._root_H is None:
            return DraftTree.chain(pending, [], []), {}
        true_pairs = self.cache.length
        builder = TreeBuilder(pending, self.shape, limit)
        hidden: dict[int, Tensor] = {0: self._root_H}
        pairs: dict[int, int] = {}  # nodes' pairs in the cache
        while not builder.done:
            if builder.steps:
                self._step(builder, hidden, pairs, true_pairs)
            states_TH = torch.stack([hidden[node] for node in builder.expanded])
            log_probs_TD = self.head.logits(states_TH[None])[0].log_softmax(-1)
            best_TC, draft_TC = log_probs_TD.topk(self.shape.width, dim=-1)
            builder.extend(self.head.target_ids(draft_TC).cpu().numpy(), best_TC.double().cpu().numpy())
        self.cache.rollback(true_pairs)
        return builder.tree, {}

    def commit(self, rows: Sequence[int], emitted: Sequence[int]) -> None:
        """The true pairs of a verified path.

        Args:
            rows: of the last step, those whose keys and values stay: the path from its root.
            emitted: the token behind each of them; the last is pending.
        """
        states_BF = self.engine.take_features()
        assert states_BF is not None
        self._extend(states_BF[list(rows)], emitted)

    @torch.no_grad()
    def _extend(self, states_TF: Tensor, tokens: Sequence[int]) -> None:
        count = len(tokens)
        assert len(states_TF) == count, (states_TF.shape, count)
        ids_1T = torch.tensor([list(tokens)], device=states_TF.device)
        first = self.cache.length
        positions_1T = torch.arange(first, first + count, device=states_TF.device)[None]
        out_1TH = self.head(ids_1T, self.head.features(states_TF[None]), positions_1T, None, self.cache)
        self._root_H = out_1TH[0, -1]

    def _step(self, builder: TreeBuilder, hidden: dict[int, Tensor], pairs: dict[int, int], true_pairs: int) -> None:
        """Runs the pairs of the nodes to expand: each sees all true pairs, its ancestors' and itself."""
        tree, nodes = builder.tree, builder.expanded
        before = self.cache.length
        mask_TK = torch.zeros(len(nodes), before + len(nodes), dtype=torch.bool)
        mask_TK[:, :true_pairs] = True
        for row, node in enumerate(nodes):
            pairs[node] = before + row
            mask_TK[row, [pairs[ancestor] for ancestor in tree.path(node)[1:]]] = True
        device = hidden[0].device
        parents = [int(tree.parents_N[node]) for node in nodes]
        ids_1T = torch.tensor([tree.tokens_N[nodes].tolist()], device=device)
        positions_1T = torch.tensor([[true_pairs - 1 + int(tree.depths_N[node]) for node in nodes]], device=device)
        states_1TH = torch.stack([hidden[parent] for parent in parents])[None]
        out_1TH = self.head(ids_1T, states_1TH, positions_1T, mask_TK[None].to(device), self.cache)
        hidden.update((node, out_1TH[0, row]) for row, node in enumerate(nodes))
