"""What rows of all papers' tables share: rates and quotients with their intervals over prompts. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from moexp import metrics
from moexp.metrics import Interval, Ratio
from moexp.report import Arm

Arms = Mapping[int, Arm]
Of = Callable[[Arm], Ratio]


class Bootstrapped:
    """Figures of a run with 95% bootstrap intervals over prompts, from `samples` of them."""

    samples: int

    def over(self, arms: Iterable[Arm], of: Of) -> Interval:
        """A ratio, pooled over prompts."""
        return metrics.bootstrap([of(arm) for arm in arms], samples=self.samples)

    def against(self, arms: Arms, of: Of, base: Arms, of_base: Of) -> Interval:
        """A quotient of two methods over the prompts that both decoded."""
        both = [request for request in arms if request in base]
        pairs = [(of(arms[request]), of_base(base[request])) for request in both]
        return metrics.bootstrap_quotient(pairs, samples=self.samples)


def rate(arm: Arm) -> Ratio:
    """Tokens a second."""
    return metrics.tokens_per_s([arm.request])


def with_ends(*names: str) -> list[str]:
    """Column names, each with those of its interval's ends."""
    return [f"{name}{end}" for name in names for end in ("", "_lo", "_hi")]
