"""What rows of all papers' tables share: rates and quotients with their intervals over prompts. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from moexp import metrics
from moexp.metrics import Array, Interval, Ratio
from moexp.tables.core.run import ArmRecords
from moexp.tables.core.table import Row, set_interval

Arms = Mapping[int, ArmRecords]
Of = Callable[[ArmRecords], Ratio]


class Bootstrapped:
    """Figures of a run with 95% bootstrap intervals over prompts, from `samples` of them."""

    samples: int

    def over(self, arms: Iterable[ArmRecords], of: Of) -> Interval:
        """A ratio, pooled over prompts."""
        return metrics.bootstrap([of(arm) for arm in arms], samples=self.samples)

    def against(self, arms: Arms, of: Of, base: Arms, of_base: Of) -> Interval:
        """A quotient of two methods over the prompts that both decoded."""
        both = [request for request in arms if request in base]
        pairs = [(of(arms[request]), of_base(base[request])) for request in both]
        return metrics.bootstrap_quotient(pairs, samples=self.samples)

    def median_against(self, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
        """The median of all first values over that of all second ones; a pair holds a prompt's, drawn together."""
        above, below = ([value for pair in pairs for value in pair[side]] for side in (0, 1))
        if not above or not below:
            return Interval(None, None, None, len(pairs))
        # A row counts what its prompt holds of each value, so that a sample's column sums are the values' weights.
        of_prompt = np.array([n for side in (0, 1) for n, pair in enumerate(pairs) for _ in pair[side]])
        rows_PN = (np.arange(len(pairs))[:, None] == of_prompt).astype(float)

        def quotient(times_SN: Array) -> Array:
            return _medians(above, times_SN[:, : len(above)]) / _medians(below, times_SN[:, len(above) :])

        lo, hi = metrics.bootstrap_ends(rows_PN, quotient, 0, self.samples, 0.95)
        return Interval(statistics.median(above) / statistics.median(below), lo, hi, len(pairs))


def _medians(values: Sequence[float], times_SN: Array) -> Array:
    """In each sample, the median of the values, each taken so many times; NaN where none is taken."""
    order = np.argsort(values)
    upto_SN = times_SN[:, order].cumsum(axis=1)
    total_S1 = upto_SN[:, -1:]
    middle = [(upto_SN >= place).argmax(axis=1) for place in ((total_S1 + 1) // 2, total_S1 // 2 + 1)]
    ordered = np.array(values)[order]
    return np.where(total_S1[:, 0] > 0, (ordered[middle[0]] + ordered[middle[1]]) / 2, np.nan)


def rate(arm: ArmRecords) -> Ratio:
    """Tokens a second."""
    return metrics.tokens_per_s([arm.request])


def throughput(run: Bootstrapped, arms: Arms, ar: Arms | None, top_k: int) -> Row:
    """A method's tokens a second, speedup over AR, alpha, bytes a token, byte bound, and where a token's time goes.

    Args:
        ar: the same prompts by AR; None for AR itself, which has neither a speedup nor a bound of one.
    """

    def bound(arm: ArmRecords) -> Ratio:
        alpha, layers = metrics.alpha(arm.steps), metrics.experts_per_layer(arm.steps)
        # alpha k / E with both means kept as sums: emitted k over the cycles' unions a layer.
        return Ratio(alpha.num * top_k, layers.num / (layers.den / alpha.den)) if layers.den else Ratio()

    row: Row = {}
    set_interval(row, "tokens_per_s", run.over(arms.values(), rate))
    set_interval(row, "speedup", None if ar is None else run.against(arms, rate, ar, rate))
    set_interval(row, "alpha", run.over(arms.values(), lambda arm: metrics.alpha(arm.steps)))
    set_interval(row, "bytes_per_token", run.over(arms.values(), lambda arm: metrics.bytes_per_token(arm.steps)))
    set_interval(row, "byte_bound", None if ar is None else run.over(arms.values(), bound))
    for part, each in metrics.time_profile(step for arm in arms.values() for step in arm.steps).items():
        row[f"{part}_ms"] = None if each.value is None else 1000 * each.value
    return row


def sameness(arms: Arms, ar: Arms, temperature: float) -> Row:
    """Whether the ids are those of AR. When sampling, methods draw different texts of one distribution."""
    if temperature:
        return {"output": "exact in distribution", "identical": None}
    both = [request for request in arms if request in ar]
    same = sum(arms[request].request.tokens == ar[request].request.tokens for request in both)
    if not both:
        return {"output": None, "identical": None}
    return {"output": "exact" if same == len(both) else "lossy", "identical": f"{same}/{len(both)}"}


def with_ends(*names: str) -> list[str]:
    """Column names, each with those of its interval's ends."""
    return [f"{name}{end}" for name in names for end in ("", "_lo", "_hi")]
