"""Selection by marginal cost: probability over the experts that a node newly brings.

Shape suffixes: N nodes, F open nodes, L MoE layers, W words a layer, X = L W words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.selectors.expert_sets import Words
from moexp.runtime.selectors.selector import check_epsilon, likeliest_first, scores


@dataclass(frozen=True)
class MarginalCost:
    """One best node after another by P over the experts it adds.

    The paper scores every node that is left, by its path from the root. No node scores above its parent, and ties go to
    the parent, so the best is always among the open nodes, whose parents are picked already; and of an open node's path
    all experts but its own are covered. So only open nodes are scored, by their own sets. Among unrelated nodes ties go
    to the likelier one, then to the lower number.

    Args:
        epsilon: added to the cost, in layer-experts; above 0. The paper gives no value. When it is small, a node that
            adds nothing outranks all that add something, however unlikely it is.
        needs: "recorded" for the oracle.

    Paper: EcoSpec Algorithm 1; EcoSpec eq. 8; EcoSpec eq. 9.
    """

    epsilon: float
    needs: Literal["predicted", "recorded"] = "predicted"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        own_NX = experts_NLW.reshape(len(tree), -1)
        missing_X = ~(np.zeros_like(own_NX[0]) if covered_LW is None else covered_LW.reshape(-1))
        order_N = likeliest_first(tree)
        open_N = np.zeros(len(tree), dtype=bool)
        open_N[0] = True
        picked: list[int] = []
        while len(picked) < min(gamma, len(tree)):
            nodes_F = order_N[open_N[order_N]]
            added_FX = own_NX.take(nodes_F, axis=0) & missing_X
            costs_F = np.bitwise_count(added_FX).sum(axis=1, dtype=np.uint32)
            best = int(scores(tree.path_probs_N[nodes_F], costs_F, self.epsilon).argmax())
            node = int(nodes_F[best])
            picked.append(node)
            missing_X ^= added_FX[best]
            open_N[node] = False
            open_N[list(tree.children[node])] = True
        return picked
