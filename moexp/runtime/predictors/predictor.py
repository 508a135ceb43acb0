"""The interface of expert predictors that follow a request from outside the target.

`begin` takes the prompt; then, cycle by cycle, `predict` takes the tree that was drafted and `commit` the tokens that
were emitted. The root of a tree is the pending token: the last of the prompt, or the last that was emitted.

Shape suffixes: N nodes, L MoE layers, k top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moexp.runtime.drafters.draft_tree import DraftTree

Routing = NDArray[np.int16]


class ExpertPredictor(Protocol):
    """Predicts routing for the nodes of draft trees, one request at a time."""

    def begin(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Start on a request. The prompt's last token is pending."""

    def predict(self, tree: DraftTree) -> Routing:
        """Experts [N, L, k] of every node given its path, by descending weight.

        Nothing is changed: the next tree may start from the same pending token.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens were emitted after the pending one; the last of them is pending now."""
