"""Draft trees and expert sets for tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from moexp.runtime.drafters.draft_tree import DraftTree, TreeShape


def build(parents: list[int], log_probs: list[float], tokens: list[int] | None = None) -> DraftTree:
    """A tree of these parents (the root's -1); by default each node's token is its number + 100."""
    tokens = list(range(100, 100 + len(parents))) if tokens is None else tokens
    return DraftTree(np.array(tokens), np.array(parents), np.array(log_probs))


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> DraftTree:
    """Any tree. Its probabilities are few, so that ties happen."""
    count = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]
    values = st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0, -float("inf")])
    return build(parents, [0.0] + [draw(values) for _ in range(1, count)])


def random_tree(nodes: int, rng: np.random.Generator) -> DraftTree:
    """A tree without ties."""
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, nodes)]
    return build(parents, [0.0, *(-rng.random(nodes - 1) * 3).tolist()])


def renumbered(tree: DraftTree, rng: np.random.Generator) -> list[int]:
    """The tree's nodes in a random order with parents before their children: an argument of `take`."""
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop(int(rng.integers(len(waiting))))
        order.append(node)
        waiting += tree.children[node]
    return order


def plane_trees(nodes: int) -> Iterator[list[int]]:
    """Parents of every ordered tree of so many nodes, in depth-first order."""

    def grow(parents: list[int]) -> Iterator[list[int]]:
        if len(parents) == nodes:
            yield parents
            return
        parent = len(parents) - 1
        while parent >= 0:  # the next node hangs somewhere on the path to the last one
            yield from grow([*parents, parent])
            parent = parents[parent]

    yield from grow([-1])


def routing(nodes: int, layers: int, experts: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct random expert ids [N, L, k]."""
    return np.argsort(rng.random((nodes, layers, experts)), axis=-1)[..., :top_k]


def full_size(shape: TreeShape) -> int:
    """Nodes of a full tree, the root included."""
    nodes, expanded = 1, 1
    for _ in range(shape.steps):
        candidates = expanded * shape.width
        expanded = min(shape.beam, candidates)
        nodes += expanded if shape.pruned else candidates
    return nodes
