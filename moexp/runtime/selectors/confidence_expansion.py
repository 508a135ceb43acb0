"""Truncation of a draft chain where its next token is not worth verifying.

`Truncation` decides token by token, while drafting; `ChainTruncation` selects from a chain that is drafted already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.selectors.expert_sets import Words, unpack_experts

CONFIDENCE_EXPANSION = "confidence-expansion"
POLICIES: dict[str, Callable[[bool, bool], bool]] = {
    "fixed": lambda doubtful, expensive: True,
    "confidence": lambda doubtful, expensive: not doubtful,
    CONFIDENCE_EXPANSION: lambda doubtful, expensive: not (doubtful and expensive),
}
"""Whether a token is appended that is doubtful (q_i < tau), and expensive (Delta_i > B_i); by policy."""


@dataclass
class Truncation:
    """One block's walk through Algorithm 1.

    Args:
        policy: a key of `POLICIES`.
        tau: confidence below which a token is doubtful.
        budget: B, layer-experts that a doubtful token may add, or None: what is left of `capacity` ("cache").
        capacity: layer-experts that the expert cache holds; None: no limit.

    Attributes:
        union: predicted verifier experts of the appended steps, U.

    Raises:
        MoexpError: unknown policy.

    Paper: DraftExpert Algorithm 1; DraftExpert eq. 12; DraftExpert eq. 13; DraftExpert eq. 14.
    """

    policy: str
    tau: float = 0.0
    budget: int | None = 0
    capacity: int | None = None
    union: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise MoexpError(
                f"unknown policy {self.policy!r}", where="decode.policy", valid=", ".join(sorted(POLICIES))
            )

    def offer(self, confidence: float, experts: Collection[Hashable]) -> bool:
        """Whether the drafted token is appended (lines 6 to 12).

        Args:
            confidence: q_i, the largest softmax probability of the draft's logits at T = 1.
            experts: predicted verifier experts of the draft step that gave the token.
        """
        new = set(experts) - self.union
        if not POLICIES[self.policy](confidence < self.tau, len(new) > self._budget_now()):
            return False
        self.union |= new
        return True

    def _budget_now(self) -> float:
        """B_i: the fixed budget, or the room that the union so far leaves in the cache."""
        if self.budget is not None:
            return self.budget
        return float("inf") if self.capacity is None else max(0, self.capacity - len(self.union))


@dataclass(frozen=True)
class ChainTruncation:
    """A chain, cut off where `Truncation` drops a token.

    A token is judged by its own probability (its draft's largest, at T = 1) and by the experts of the token before it,
    which are those that the draft step that gave it predicted. The union starts empty, as in the paper, whatever is
    covered.

    Args:
        tau, budget: as for `Truncation`.

    Raises:
        MoexpError: from `pick`: a tree that branches.

    Paper: DraftExpert eq. 14.
    """

    tau: float = 0.5
    budget: int | None = 60
    needs: ClassVar[Literal["predicted"]] = "predicted"

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        if not tree.is_chain:
            what = f"{CONFIDENCE_EXPANSION} on a tree"
            raise MoexpError(what, where="decode.selector", valid="a chain: a tree of width 1")
        truncation = Truncation(CONFIDENCE_EXPANSION, self.tau, self.budget)
        confidences = np.exp(tree.log_probs_N)
        picked = [0]
        while len(picked) < min(gamma, len(tree)):
            before_LW = experts_NLW[picked[-1]]
            experts = np.flatnonzero(unpack_experts(before_LW, before_LW.shape[-1] * 64))  # unique over layers
            if not truncation.offer(float(confidences[len(picked)]), experts.tolist()):
                break
            picked.append(len(picked))
        return picked
