"""What selectors have in common: the interface, and `select`, which counts what a choice costs.

Costs are counted in layer-experts. Shape suffixes: N nodes, L MoE layers, W words of an expert set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.draft_tree import DraftTree, Floats, Ints
from moexp.runtime.selectors.expert_sets import Words, count_experts


@dataclass(frozen=True)
class Selection:
    """Nodes to verify.

    Attributes:
        nodes: in the order they were picked: the root first, parents before their children.
        costs: layer-experts that each newly brought when it was picked; None without expert sets.
        covered_LW: B, all that are covered after the last pick; None without expert sets.
    """

    nodes: tuple[int, ...]
    costs: tuple[int, ...] | None = None
    covered_LW: Words | None = None


class Selector(Protocol):
    """A strategy.

    Attributes:
        needs: which expert sets it looks at: none, those predicted before verification, or those that the target's
            router was recorded to choose (an upper bound for analysis, not a method to decode with).
    """

    @property
    def needs(self) -> Literal["none", "predicted", "recorded"]: ...

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        """Up to `gamma` nodes, prefix-closed, root first; arguments as for `select`."""


def select(
    selector: Selector,
    tree: DraftTree,
    gamma: int,
    experts_NLW: Words | None = None,
    covered_LW: Words | None = None,
) -> Selection:
    """Choose the nodes to verify.

    Args:
        selector: the strategy.
        tree: all candidates.
        gamma: nodes at most, the root included.
        experts_NLW: expert set of each node, the root's included. No set may be left empty for want of a prediction: an
            empty set costs nothing, and its node would outrank others.
        covered_LW: B_0, experts that cost nothing from the start: of the batch's rows before, or held in a cache.

    Raises:
        MoexpError: gamma below 1, or a strategy without the expert sets that it needs.
    """
    if gamma < 1:
        raise MoexpError(f"gamma = {gamma}", where="decode.gamma", valid="from 1: the root counts")
    if experts_NLW is None:
        if selector.needs != "none":
            raise MoexpError("selection by cost without expert sets", where="decode.selector", valid="with a predictor")
        return Selection(tuple(selector.pick(tree, gamma, None, None)))
    assert len(experts_NLW) == len(tree)
    nodes = selector.pick(tree, gamma, experts_NLW, covered_LW)
    start_1LW = np.zeros_like(experts_NLW[:1]) if covered_LW is None else covered_LW[None]
    covered_SLW = np.bitwise_or.accumulate(np.concatenate([start_1LW, experts_NLW[nodes]]), axis=0)
    costs = np.diff(count_experts(covered_SLW))
    return Selection(tuple(nodes), tuple(costs.tolist()), covered_SLW[-1])


def likeliest_first(tree: DraftTree) -> Ints:
    """Nodes by descending P; of equal ones the lower number, so that parents stand before their children."""
    return np.argsort(-tree.path_probs_N, kind="stable")


def scores(path_probs_N: Floats, costs_N: NDArray[np.integer], epsilon: float) -> Floats:
    """P / (cost + epsilon), of marginal costs or of the costs of paths.

    Exact monotone arithmetic: a child's score is never above its parent's, not even by rounding.

    Paper: EcoSpec eq. 9; EcoSpec eq. 10.
    """
    return path_probs_N / (costs_N + epsilon)


def check_epsilon(epsilon: float) -> None:
    """MoexpError unless it is above 0."""
    if not epsilon > 0:
        raise MoexpError(f"epsilon = {epsilon}", where="decode.epsilon", valid="above 0")
