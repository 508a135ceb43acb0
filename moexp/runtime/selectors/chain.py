"""Which drafted tokens are worth verifying: truncation of a draft chain (DraftExpert, equations 12 to 14, Algorithm 1).

Pure: no tensors, no model, no store; shared by the runtime and the simulator. A decision may look at the draft
distribution and at predicted experts of the tokens before, never at which token was drawn from that distribution nor at
target samples: otherwise sampled output would no longer follow the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

from moexp.base.errors import MoexpError


@dataclass(frozen=True)
class Offer:
    """What a truncation policy may look at before token i is appended.

    Attributes:
        confidence: q_i, the largest softmax probability of the draft's logits at T = 1.
        expansion: Delta_i = |U_i| - |U_{i-1}|, layer-experts that step i newly predicts (equation 13).
        tau: confidence below which a token is doubtful.
        budget: B_i, layer-experts that a doubtful token may add.
    """

    confidence: float
    expansion: int
    tau: float
    budget: int


def keep_always(offer: Offer) -> bool:
    """Fixed K."""
    return True


def keep_confident(offer: Offer) -> bool:
    """Stop at the first doubtful token."""
    return not offer.confidence < offer.tau


def keep_confident_or_cheap(offer: Offer) -> bool:
    """Stop where the token is doubtful and brings too many experts: q_i < tau and Delta_i > B_i (equation 14)."""
    return not (offer.confidence < offer.tau and offer.expansion > offer.budget)


POLICIES: dict[str, Callable[[Offer], bool]] = {
    "fixed": keep_always,
    "confidence": keep_confident,
    "confidence-expansion": keep_confident_or_cheap,
}


@dataclass
class Truncation:
    """One block's walk through Algorithm 1.

    Args:
        policy: a key of `POLICIES`.
        tau: see `Offer`.
        budget: B, the same for all tokens, or None: what is left of `capacity` ("cache").
        capacity: layer-experts that the expert cache holds; None: no limit.

    Attributes:
        union: predicted verifier experts of the kept steps, U (equation 12).

    Raises:
        MoexpError: unknown policy.
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
            confidence: q_i.
            experts: predicted verifier experts of the draft step that gave the token.
        """
        new = set(experts) - self.union
        offer = Offer(confidence, len(new), self.tau, self.budget_now())
        if not POLICIES[self.policy](offer):
            return False
        self.union |= new
        return True

    def budget_now(self) -> int:
        """B_i: the fixed budget, or the room that the union so far leaves in the cache."""
        if self.budget is not None:
            return self.budget
        if self.capacity is None:
            return 1 << 62  # a cache without limit: no token is too expensive
        return max(0, self.capacity - len(self.union))
