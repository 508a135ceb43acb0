"""Selection by global cost: probability over the cost of a node's path, whatever else was picked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.selectors.expert_sets import Words, count_experts
from moexp.runtime.selectors.selector import check_epsilon, likeliest_first, scores


def path_experts(tree: DraftTree, experts_NLW: Words) -> Words:
    """E_traj: the union of expert sets along each node's path from the root.

    Paper: EcoSpec eq. 7.
    """
    paths_NLW = experts_NLW.copy()
    for node, parent in enumerate(tree.parents_N[1:].tolist(), start=1):
        paths_NLW[node] |= paths_NLW[parent]
    return paths_NLW


@dataclass(frozen=True)
class GlobalCost:
    """The `gamma` best nodes by P over the cost of the path.

    Args:
        epsilon: added to the cost, in layer-experts; above 0.

    Paper: EcoSpec eq. 10.
    """

    epsilon: float
    needs: ClassVar[Literal["predicted"]] = "predicted"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        order_N = likeliest_first(tree)
        score_N = scores(tree.path_probs_N, count_experts(path_experts(tree, experts_NLW)), self.epsilon)
        return order_N[np.argsort(-score_N[order_N], kind="stable")][:gamma].tolist()
