"""Selection by confidence: the likeliest nodes, as EAGLE verifies them."""

from __future__ import annotations

from typing import Literal

from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.selectors.expert_sets import Words
from moexp.runtime.selectors.selector import likeliest_first


class Confidence:
    """The `gamma` likeliest nodes by P."""

    needs: Literal["none"] = "none"

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        return likeliest_first(tree)[:gamma].tolist()
