"""Draft trees: candidate continuations of the pending token, and the arithmetic of their nodes.

Pure numpy, shared by the runtime and the simulator. Node 0 is the root: the last token that was emitted, which is
verified together with its candidates and counts towards the budget. A chain is a tree whose nodes have one child each.

Shape suffixes: N nodes, S chosen nodes, F nodes that a draft step expands, C candidates of each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moexp.base.errors import MoexpError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """An immutable tree of tokens. Parents stand before their children, and siblings are different tokens.

    Attributes:
        tokens_N: token ids; the root's first.
        parents_N: node that each continues; -1 for the root.
        log_probs_N: log of the draft's probability of each token given its path, at most 0; 0 for the root.
        depths_N: edges from the root.
        path_probs_N: P, the product of probabilities along the path from the root: never above the parent's.
        children: of each node, in node order.
    """

    tokens_N: Ints
    parents_N: Ints
    log_probs_N: Floats
    depths_N: Ints = field(init=False)
    path_probs_N: Floats = field(init=False)
    children: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        tokens_N = np.array(self.tokens_N, dtype=np.int64)
        parents_N = np.array(self.parents_N, dtype=np.int64)
        log_probs_N = np.array(self.log_probs_N, dtype=np.float64)
        assert tokens_N.ndim == 1 and tokens_N.shape == parents_N.shape == log_probs_N.shape
        assert len(tokens_N) and parents_N[0] == -1 and log_probs_N[0] == 0, "node 0 is the root"
        assert (log_probs_N <= 0).all(), "log-probabilities above 0, or NaN"
        depths_N = np.zeros_like(parents_N)
        # Products, not exponentials of sums: P(child) <= P(parent) then holds to the last bit.
        path_probs_N = np.exp(log_probs_N)
        children: list[list[int]] = [[] for _ in tokens_N]
        for node, parent in enumerate(parents_N[1:].tolist(), start=1):
            assert 0 <= parent < node, "a parent behind its child"
            depths_N[node] = depths_N[parent] + 1
            path_probs_N[node] *= path_probs_N[parent]
            children[parent].append(node)
        pairs = set(zip(parents_N.tolist(), tokens_N.tolist(), strict=True))
        assert len(pairs) == len(tokens_N), "siblings of the same token"
        names = ("tokens_N", "parents_N", "log_probs_N", "depths_N", "path_probs_N")
        for name, array in zip(names, (tokens_N, parents_N, log_probs_N, depths_N, path_probs_N), strict=True):
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "children", tuple(map(tuple, children)))

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int], log_probs: Sequence[float]) -> DraftTree:
        """The tree of one path: `root`, then each token as the child of the one before."""
        count = len(tokens)
        return cls(np.array([root, *tokens]), np.arange(-1, count), np.array([0.0, *log_probs]))

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def is_chain(self) -> bool:
        return all(len(below) < 2 for below in self.children)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(int(self.parents_N[path[-1]]))
        return path[::-1]

    def is_prefix_closed(self, nodes: Collection[int]) -> bool:
        """Whether every node's parent is among them, and so the root."""
        chosen = set(nodes)
        return 0 in chosen and all(int(self.parents_N[node]) in chosen for node in chosen if node)

    def depth_first(self, nodes: Collection[int] | None = None) -> list[int]:
        """A prefix-closed set of nodes (all by default) in depth-first order, likelier children first.

        The path of likeliest children then comes first, without gaps: where it is accepted, its keys and values already
        lie where a chain's would.
        """
        chosen = set(range(len(self)) if nodes is None else nodes)
        assert self.is_prefix_closed(chosen), "not prefix-closed"
        order, stack = [], [0]
        while stack:
            node = stack.pop()
            order.append(node)
            below = [child for child in self.children[node] if child in chosen]
            stack += sorted(below, key=lambda child: (self.path_probs_N[child], -child))
        return order

    def take(self, nodes: Sequence[int]) -> DraftTree:
        """The sub-tree of a prefix-closed set of nodes, re-indexed in the order given.

        Args:
            nodes: the root first, parents before their children; node i of the result is nodes[i] here.
        """
        rank = {int(node): number for number, node in enumerate(nodes)}
        assert len(rank) == len(nodes) and self.is_prefix_closed(rank), "not a prefix-closed set"
        nodes_S = np.array(nodes, dtype=np.int64)
        parents = [rank[parent] if parent >= 0 else -1 for parent in self.parents_N[nodes_S].tolist()]
        return DraftTree(self.tokens_N[nodes_S], np.array(parents), self.log_probs_N[nodes_S])

    def mask(self) -> NDArray[np.bool_]:
        """Which nodes each node sees, [N, N]: itself and its ancestors."""
        mask_NN = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents_N[1:].tolist(), start=1):
            mask_NN[node] |= mask_NN[parent]
        return mask_NN


@dataclass(frozen=True)
class TreeShape:
    """How a tree is grown; by default 3 steps of which 2 tokens are expanded, as in the paper.

    Attributes:
        steps: draft steps; the depth.
        width: candidates of each node that a step expands: the draft's likeliest tokens.
        beam: nodes that the next step expands: the likeliest of a step's candidates, by P.
        pruned: whether the other candidates leave the tree. Otherwise they stay, as leaves.

    Raises:
        MoexpError: a number below 1.

    Paper: EcoSpec section 5.1.
    """

    steps: int = 3
    width: int = 2
    beam: int = 2
    pruned: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "width", "beam"):
            if getattr(self, name) < 1:
                raise MoexpError(f"{name} = {getattr(self, name)}", where=f"decode.tree.{name}", valid="from 1")


class TreeBuilder:
    """Grows a draft tree step by step.

    `expanded` are the nodes that the next draft step runs, `extend` takes its result. Children are the draft's
    likeliest tokens and depend on the draft distribution alone: nothing is drawn, as tree verification assumes.

    Args:
        root: the pending token.
        shape: how the tree is grown.
        limit: steps at most, where the shape has more.
    """

    def __init__(self, root: int, shape: TreeShape, limit: int | None = None) -> None:
        self.shape = shape if limit is None else replace(shape, steps=min(limit, shape.steps))
        self.steps = 0
        self.expanded: list[int] = [0]
        self._tokens, self._parents, self._log_probs = [root], [-1], [0.0]
        self._probs = [1.0]

    @property
    def done(self) -> bool:
        """Whether all steps are taken."""
        return self.steps == self.shape.steps

    @property
    def tree(self) -> DraftTree:
        """The tree so far. Nodes keep their numbers as it grows."""
        return DraftTree(np.array(self._tokens), np.array(self._parents), np.array(self._log_probs))

    def extend(self, tokens_FC: NDArray[np.integer], log_probs_FC: NDArray[np.floating]) -> None:
        """Add one draft step's candidates.

        Args:
            tokens_FC: up to `width` different tokens for each node of `expanded`, in its order.
            log_probs_FC: of the draft, given each node's path; above 0 by rounding counts as 0.
        """
        assert not self.done
        assert tokens_FC.shape == log_probs_FC.shape and len(tokens_FC) == len(self.expanded)
        assert 1 <= tokens_FC.shape[1] <= self.shape.width
        log_probs = np.minimum(np.asarray(log_probs_FC, dtype=np.float64), 0.0).ravel()
        tokens, parents = tokens_FC.ravel(), np.repeat(self.expanded, tokens_FC.shape[1])
        probs = np.array(self._probs)[parents] * np.exp(log_probs)
        # A stable sort: of equally likely candidates the first is expanded.
        best = np.argsort(-probs, kind="stable")[: self.shape.beam].tolist()
        retained = sorted(best) if self.shape.pruned else list(range(len(probs)))
        number = {candidate: node for node, candidate in enumerate(retained, start=len(self._tokens))}
        for candidate in retained:
            self._tokens.append(int(tokens[candidate]))
            self._parents.append(int(parents[candidate]))
            self._log_probs.append(float(log_probs[candidate]))
            self._probs.append(float(probs[candidate]))
        self.expanded = [number[candidate] for candidate in best]
        self.steps += 1


def blocks_of(tree: DraftTree, rows: int, nodes: Collection[int] | None = None) -> list[list[int]]:
    """Sets of nodes, each with all ancestors and of at most `rows`, that together cover `nodes` (by default the tree).

    Raises:
        MoexpError: a path longer than a block.
    """
    deepest = int(tree.depths_N.max()) + 1
    if deepest > rows:
        raise MoexpError(f"a path of {deepest} nodes in steps of {rows} rows", where="decode.tree.steps")
    blocks: list[list[int]] = []
    waiting = list(range(len(tree)) if nodes is None else nodes)
    while waiting:
        block: set[int] = set()
        for node in waiting:
            with_node = block | set(tree.path(node))
            if len(with_node) <= rows:
                block = with_node
        blocks.append(sorted(block))
        waiting = [node for node in waiting if node not in block]
    return blocks
