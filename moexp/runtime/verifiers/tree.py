"""Verification of a draft tree: greedy matching at T = 0, sampling without replacement at T > 0.

The tree is fixed before the target runs, so a child is a proposal of probability 1: chain speculative sampling
(`moexp.runtime.verifiers.chain`) with a one-hot draft distribution, repeated over siblings. Child x is accepted with
probability p(x); otherwise x is excluded, p renormalised, and the next sibling tried with what is left. The emitted
tokens follow the target's distribution exactly, whatever the tree and however its nodes were selected.

Shape suffixes: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.verifiers.chain import Verdict
from moexp.runtime.verifiers.sampling import Sampler, Sampling, probabilities


def verify_tree(tree: DraftTree, logits_NV: Tensor, sampling: Sampling, sampler: Sampler) -> Verdict:
    """Verify by the target's logits: greedily, or sampled from what `sampling` makes of them.

    Args:
        tree: the nodes that were verified.
        logits_NV: of the target, behind each node's path.
        sampling: temperature, top-k and top-p, applied to the target.
        sampler: the request's; not used when greedy.
    """
    assert len(logits_NV) == len(tree)
    if sampling.greedy:
        return verify_tree_greedy(tree, logits_NV.argmax(-1).tolist())

    # Node by node: most are never reached, and top-p sorts a whole vocabulary.
    def p_at(node: int) -> Tensor:
        return probabilities(logits_NV[node], sampling)

    return verify_tree_sampled(tree, p_at, sampler.flip, sampler.draw)


def verify_tree_greedy(tree: DraftTree, target: Sequence[int]) -> Verdict:
    """Accept children while one of them is the target's own token.

    Args:
        tree: the nodes that were verified.
        target: N tokens: the target's behind each node.
    """
    assert len(target) == len(tree)
    path = [0]
    while True:
        token = int(target[path[-1]])
        child = next((child for child in tree.children[path[-1]] if tree.tokens_N[child] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)


def verify_tree_sampled(
    tree: DraftTree,
    p_at: Callable[[int], Tensor],
    flip: Callable[[float], bool],
    draw_from: Callable[[Tensor], int],
) -> Verdict:
    """Speculative sampling on a tree whose children were not drawn.

    Args:
        tree: the nodes that were verified; siblings are tried in node order.
        p_at: the target's distribution [V] behind a node's path; called once for each node of the accepted path.
        flip: True with the given probability.
        draw_from: draws from a distribution.

    Returns:
        tokens whose joint distribution is that of drawing from the target one by one.
    """
    path = [0]
    while True:
        child, left_V = _try_children(tree, path[-1], p_at(path[-1]), flip)
        if child is None:
            return Verdict(tuple(path), draw_from(left_V))
        path.append(child)


def _try_children(tree: DraftTree, node: int, p_V: Tensor, flip: Callable[[float], bool]) -> tuple[int | None, Tensor]:
    """The accepted child of a node, or None; and p without the rejected children, renormalised."""
    left_V = p_V
    for child in tree.children[node]:
        token = int(tree.tokens_N[child])
        if flip(float(left_V[token])):
            return child, left_V
        rest_V = left_V.index_fill(-1, torch.tensor(token, device=left_V.device), 0.0)
        total = float(rest_V.sum())
        if not total > 0:  # nothing else is left: only rounding keeps its probability below 1
            return child, left_V
        left_V = rest_V / total
    return None, left_V
