"""Selection of the fewest experts: a bound on what any selection can save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.selectors.expert_sets import Words
from moexp.runtime.selectors.selector import likeliest_first


class Cheapest:
    """The `gamma` nodes that touch the fewest experts by the target's own routing, whatever their probability: a bound
    on what any selection can save, for analysis.

    Exact by search over all prefix-closed choices, given up where they cost more than the best so far. Of equally cheap
    ones the likeliest is returned; after `steps` extensions, the best so far (trees of 3 steps and width 4 need far
    fewer).
    """

    needs: Literal["recorded"] = "recorded"
    steps = 200_000

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        own = [int.from_bytes(words_LW.tobytes(), "little") for words_LW in experts_NLW]
        start = 0 if covered_LW is None else int.from_bytes(covered_LW.tobytes(), "little")
        size = min(gamma, len(tree))
        best: tuple[int, float, list[int]] | None = None
        left = self.steps

        def extend(picked: list[int], covered: int, open_: Sequence[int]) -> None:
            """All choices that include `picked`, each next node from `open_`, and none of `open_` before it."""
            nonlocal best, left
            cost = (covered & ~start).bit_count()
            if best is not None and (cost > best[0] or left <= 0):
                return
            if len(picked) == size:
                improbability = -math.fsum(tree.path_probs_N[picked])
                best = min(best or (cost, improbability, picked), (cost, improbability, picked))
                return
            left -= 1
            for index, node in enumerate(open_):
                rest = (*open_[index + 1 :], *tree.children[node])
                extend([*picked, node], covered | own[node], rest)

        extend([0], start | own[0], tree.children[0])
        assert best is not None
        return [node for node in likeliest_first(tree).tolist() if node in best[2]]
