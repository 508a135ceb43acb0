"""Selectors by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moexp.base.errors import MoexpError
from moexp.runtime.selectors.cheapest import Cheapest
from moexp.runtime.selectors.confidence import Confidence
from moexp.runtime.selectors.confidence_expansion import CONFIDENCE_EXPANSION, ChainTruncation
from moexp.runtime.selectors.global_cost import GlobalCost
from moexp.runtime.selectors.marginal_cost import MarginalCost
from moexp.runtime.selectors.selector import Selector


@dataclass(frozen=True)
class SelectorOptions:
    """Numbers that selectors take, each as far as it needs them: see `MarginalCost` and `ChainTruncation`."""

    epsilon: float = 1.0
    tau: float = 0.5
    budget: int | None = 60


SELECTORS: dict[str, Callable[[SelectorOptions], Selector]] = {
    "confidence": lambda options: Confidence(),
    CONFIDENCE_EXPANSION: lambda options: ChainTruncation(options.tau, options.budget),
    "global-cost": lambda options: GlobalCost(options.epsilon),
    "marginal-cost": lambda options: MarginalCost(options.epsilon),
    "oracle": lambda options: MarginalCost(options.epsilon, needs="recorded"),
    "cheapest": lambda options: Cheapest(),
}


def make_selector(name: str, options: SelectorOptions) -> Selector:
    """The selector of this name.

    Raises:
        MoexpError: an unknown name, or an epsilon that is not above 0.
    """
    if name not in SELECTORS:
        raise MoexpError(f"unknown selector {name!r}", where="decode.selector", valid=", ".join(sorted(SELECTORS)))
    return SELECTORS[name](options)
