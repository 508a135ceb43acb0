"""What rows of all papers' tables share: rates and quotients with their intervals over prompts. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moexp import metrics
from moexp.metrics import Array, Interval, Ratio
from moexp.records import StepRecord
from moexp.tables.core.run import ArmRecords
from moexp.tables.core.table import Row, set_interval

Arms = Mapping[int, ArmRecords]
"""Prompt -> what one method did with it."""

ArmMetric = Callable[[ArmRecords], Ratio]
StepMetric = Callable[[Iterable[StepRecord]], Ratio]


def steps_of(arms: Arms) -> list[StepRecord]:
    """The cycles of all prompts."""
    return [step for arm in arms.values() for step in arm.steps]


def of_steps(metric: StepMetric) -> ArmMetric:
    """A metric of cycles as one of what a method did with a prompt."""
    return lambda arm: metric(arm.steps)


@dataclass(kw_only=True)
class Bootstrapped:
    """Figures of a run with 95% bootstrap intervals over prompts, from `samples` of them."""

    samples: int = 2000

    def over(self, arms: Arms, metric: ArmMetric) -> Interval:
        """A ratio, pooled over prompts."""
        return metrics.bootstrap([metric(arm) for arm in arms.values()], samples=self.samples)

    def cells(self, arms: Arms, **metrics_by_name: StepMetric) -> Row:
        """Metrics of cycles, each in a column with its interval."""
        row: Row = {}
        for name, metric in metrics_by_name.items():
            set_interval(row, name, self.over(arms, of_steps(metric)))
        return row

    def against(self, arms: Arms, metric: ArmMetric, base: Arms, base_metric: ArmMetric) -> Interval:
        """A quotient of two methods over the prompts that both decoded."""
        pairs = [(metric(arms[prompt]), base_metric(base[prompt])) for prompt in arms if prompt in base]
        return metrics.bootstrap_quotient(pairs, samples=self.samples)

    def median_against(self, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
        """The median of all first values over that of all second ones; a pair holds a prompt's, drawn together."""
        above, below = ([value for pair in pairs for value in pair[side]] for side in (0, 1))
        if not above or not below:
            return Interval(None, None, None, len(pairs))
        # A row counts what its prompt holds of each value, so that a sample's column sums are the values' weights.
        prompt_of_N = np.array([n for side in (0, 1) for n, pair in enumerate(pairs) for _ in pair[side]])
        rows_PN = (np.arange(len(pairs))[:, None] == prompt_of_N).astype(float)

        def quotient(times_SN: Array) -> Array:
            return _medians(above, times_SN[:, : len(above)]) / _medians(below, times_SN[:, len(above) :])

        lo, hi = metrics.bootstrap_ends(rows_PN, quotient, 0, self.samples, 0.95)
        return Interval(statistics.median(above) / statistics.median(below), lo, hi, len(pairs))


def _medians(values: Sequence[float], times_SN: Array) -> Array:
    """In each sample, the median of the values, each drawn so many times; NaN where none is drawn."""
    order = np.argsort(values)
    upto_SN = times_SN[:, order].cumsum(axis=1)
    total_S1 = upto_SN[:, -1:]
    middle = [(upto_SN >= rank).argmax(axis=1) for rank in ((total_S1 + 1) // 2, total_S1 // 2 + 1)]
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

    row = run.cells(arms, alpha=metrics.alpha, bytes_per_token=metrics.bytes_per_token)
    set_interval(row, "tokens_per_s", run.over(arms, rate))
    set_interval(row, "speedup", None if ar is None else run.against(arms, rate, ar, rate))
    set_interval(row, "byte_bound", None if ar is None else run.over(arms, bound))
    for part, seconds in metrics.time_profile(steps_of(arms)).items():
        row[f"{part}_ms"] = None if seconds.value is None else 1000 * seconds.value
    return row


def sameness(arms: Arms, ar: Arms, temperature: float) -> Row:
    """Whether the ids are those of AR. When sampling, methods draw different texts of one distribution."""
    if temperature:
        return {"output": "exact in distribution", "identical": None}
    both = [prompt for prompt in arms if prompt in ar]
    if not both:
        return {"output": None, "identical": None}
    same = sum(arms[prompt].request.tokens == ar[prompt].request.tokens for prompt in both)
    return {"output": "exact" if same == len(both) else "lossy", "identical": f"{same}/{len(both)}"}


def with_ends(*names: str) -> list[str]:
    """Column names, each with those of its interval's ends."""
    return [f"{name}{end}" for name in names for end in ("", "_lo", "_hi")]
