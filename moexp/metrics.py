"""From records to numbers. Pure: no torch, no I/O.

Every metric is a `Ratio`: a sum and a count that are kept apart and divided once, at the end, so that a
mean over prompts, workloads or ranks is the mean over what was counted and not a mean of means. What was
never counted has no value (None), which is not 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moexp.records import RequestRecord, StepRecord

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """`num / den`, not yet divided. Ratios of the same metric add up."""

    num: float = 0.0
    den: float = 0.0

    @property
    def value(self) -> float | None:
        """The quotient; None where nothing was counted."""
        return self.num / self.den if self.den else None

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.num + other.num, self.den + other.den)


class Interval(NamedTuple):
    """A value with its interval over prompts; None where there is no value, or too few prompts."""

    value: float | None
    lo: float | None
    hi: float | None
    prompts: int


def pooled(ratios: Iterable[Ratio]) -> Ratio:
    """The sum of ratios of one metric."""
    return sum(ratios, Ratio())


def quotient(above: Ratio, below: Ratio) -> float | None:
    """`above / below` of two ratios; None where either has no value or the lower one is 0."""
    top, bottom = above.value, below.value
    return None if top is None or not bottom else top / bottom


# --- decoding ---


def acceptance(steps: Iterable[StepRecord]) -> Ratio:
    """Accepted drafted tokens over drafted tokens.

    Paper: DraftExpert Table 3.
    """
    return pooled(Ratio(step.accepted, step.drafted) for step in steps)


def alpha(steps: Iterable[StepRecord]) -> Ratio:
    """Tokens emitted a cycle, bonus included."""
    return pooled(Ratio(step.emitted, 1) for step in steps)


def unique_draft(steps: Iterable[StepRecord]) -> Ratio:
    """Layer-experts that drafting a block touched, a cycle."""
    return pooled(Ratio(step.unique_draft, 1) for step in steps if step.unique_draft is not None)


def unique_verify(steps: Iterable[StepRecord]) -> Ratio:
    """Layer-experts that verifying a block touched, a cycle."""
    return pooled(Ratio(step.unique_verify, 1) for step in steps if step.unique_verify is not None)


def experts_per_layer(steps: Iterable[StepRecord]) -> Ratio:
    """EcoSpec's E: `unique_verify` a MoE layer."""
    return pooled(
        Ratio(step.unique_verify, step.union_layers)
        for step in steps
        if step.unique_verify is not None and step.union_layers is not None
    )


def router_agreement(steps: Iterable[StepRecord]) -> Ratio:
    """Mean overlap of draft-path and target top-k over verified tokens and layers."""
    return pooled(
        Ratio(step.router_overlap, step.router_slots)
        for step in steps
        if step.router_overlap is not None and step.router_slots is not None
    )


def draft_time(steps: Iterable[StepRecord]) -> Ratio:
    """Seconds of drafting a cycle."""
    return pooled(Ratio(step.draft_s, 1) for step in steps)


def verify_time(steps: Iterable[StepRecord]) -> Ratio:
    """Seconds of verifying a cycle."""
    return pooled(Ratio(step.verify_s, 1) for step in steps)


def token_time(steps: Iterable[StepRecord]) -> Ratio:
    """Seconds a token that was emitted."""
    return pooled(Ratio(step.cycle_s, step.emitted) for step in steps)


def verify_cost(steps: Iterable[StepRecord], ar_steps: Iterable[StepRecord]) -> float | None:
    """Verify time over one-token AR time; both from the same run and store.

    Paper: DraftExpert Table 4.
    """
    return quotient(verify_time(steps), token_time(ar_steps))


def tokens_per_s(requests: Iterable[RequestRecord]) -> Ratio:
    """Decode throughput: new tokens, counted by ids, over seconds without the prefill."""
    return pooled(Ratio(request.new_tokens, request.decode_s) for request in requests)


def speedup(requests: Iterable[RequestRecord], ar_requests: Iterable[RequestRecord]) -> float | None:
    """Decode throughput over that of AR with the same store and budget, from one interleaved run."""
    return quotient(tokens_per_s(requests), tokens_per_s(ar_requests))


# --- the store ---


def prefetch_hit(steps: Iterable[StepRecord]) -> Ratio:
    """Prefetched experts that were then demanded, over prefetched."""
    return _store_ratio(steps, "used", "prefetched")


def prefetch_waste(steps: Iterable[StepRecord]) -> Ratio:
    """1 - `prefetch_hit`."""
    hit = prefetch_hit(steps)
    return Ratio(hit.den - hit.num, hit.den)


def prefetch_coverage(steps: Iterable[StepRecord]) -> Ratio:
    """Experts demanded by verification that a prefetch had covered, over those demanded."""
    return _store_ratio(steps, "used", "verify_demanded")


def bytes_per_token(steps: Iterable[StepRecord]) -> Ratio:
    """Bytes read a token emitted."""
    return pooled(Ratio(s.store["read_bytes"], s.emitted) for s in steps if "read_bytes" in s.store)


def stall_per_token(steps: Iterable[StepRecord]) -> Ratio:
    """Seconds spent waiting for experts, a token emitted."""
    return pooled(Ratio(s.store["stall_s"], s.emitted) for s in steps if "stall_s" in s.store)


def stall_share(steps: Iterable[StepRecord]) -> Ratio:
    """Share of decoding that was spent waiting for experts."""
    return pooled(Ratio(s.store["stall_s"], s.cycle_s) for s in steps if "stall_s" in s.store)


TIME_PARTS = ("draft_compute", "draft_wait", "verify_compute", "verify_wait", "rest")
"""Where a cycle's time goes, in order; AR's steps count as verification."""


def time_profile(steps: Iterable[StepRecord]) -> dict[str, Ratio]:
    """Seconds a token emitted, by part of the cycle; the parts sum to `token_time`.

    Waiting is what the store counted as stalls while drafting and while verifying; compute is the rest of either.
    """
    times = {part: Ratio() for part in TIME_PARTS}
    for step in steps:
        draft_wait = step.store.get("draft_stall_s", 0.0)
        verify_wait = step.store.get("verify_stall_s", 0.0) + step.store.get("ar_stall_s", 0.0)
        parts = [step.draft_s - draft_wait, draft_wait, step.verify_s - verify_wait, verify_wait]
        parts.append(step.cycle_s - step.draft_s - step.verify_s)
        for part, seconds in zip(TIME_PARTS, parts, strict=True):
            times[part] += Ratio(seconds, step.emitted)
    return times


def _store_ratio(steps: Iterable[StepRecord], above: str, below: str) -> Ratio:
    return pooled(
        Ratio(step.store[above], step.store[below]) for step in steps if above in step.store and below in step.store
    )


# --- text and routing ---


def agreement(draft_ids: Sequence[int], target_ids: Sequence[int]) -> Ratio:
    """Teacher-forced share of positions where the draft's argmax is the target's.

    Paper: DraftExpert Table 5.
    """
    same = sum(a == b for a, b in zip(draft_ids, target_ids, strict=True))
    return Ratio(same, len(target_ids))


def repeated_ngrams(texts: Iterable[Sequence[int]], n: int = 4) -> Ratio:
    """Share of n-grams of decoded text that occurred earlier in the same text: how much it loops."""
    result = Ratio()
    for tokens in texts:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        result += Ratio(len(grams) - len(set(grams)), len(grams))
    return result


# --- intervals ---


def by_request(steps: Iterable[StepRecord]) -> dict[int, list[StepRecord]]:
    """Steps of each request, in order."""
    grouped: dict[int, list[StepRecord]] = defaultdict(list)
    for step in steps:
        grouped[step.request].append(step)
    return dict(grouped)


def bootstrap(per_prompt: Sequence[Ratio], *, seed: int = 0, samples: int = 2000, level: float = 0.95) -> Interval:
    """The pooled ratio with a percentile bootstrap interval over prompts, the same for the same seed."""
    rows_P2 = np.array([(ratio.num, ratio.den) for ratio in per_prompt], dtype=float).reshape(-1, 2)
    ends = bootstrap_ends(rows_P2, lambda s_S2: s_S2[:, 0] / s_S2[:, 1], seed, samples, level)
    return Interval(pooled(per_prompt).value, ends[0], ends[1], len(per_prompt))


def bootstrap_quotient(
    per_prompt: Sequence[tuple[Ratio, Ratio]], *, seed: int = 0, samples: int = 2000, level: float = 0.95
) -> Interval:
    """`quotient` of two pooled ratios with its interval; a prompt's two arms are drawn together."""
    rows_P4 = np.array([(a.num, a.den, b.num, b.den) for a, b in per_prompt], dtype=float).reshape(-1, 4)
    ends = bootstrap_ends(rows_P4, lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3]), seed, samples, level)
    value = quotient(pooled(a for a, _ in per_prompt), pooled(b for _, b in per_prompt))
    return Interval(value, ends[0], ends[1], len(per_prompt))


def bootstrap_ends(
    rows_Pm: Array, statistic: Callable[[Array], Array], seed: int, samples: int, level: float
) -> tuple[float, float] | tuple[None, None]:
    """Percentiles of the statistic of column sums over resampled rows; None where there are fewer than two rows.

    Args:
        rows_Pm: one row a prompt.
        statistic: from column sums [S, m] of each sample to its value [S]; one that is not finite is left out.
    """
    prompts = len(rows_Pm)
    if prompts < 2:
        return None, None
    times_SP = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=samples)
    with np.errstate(divide="ignore", invalid="ignore"):
        values_S = statistic(times_SP @ rows_Pm)
    values_S = values_S[np.isfinite(values_S)]
    if not len(values_S):
        return None, None
    tail = (1 - level) / 2
    lo, hi = np.quantile(values_S, (tail, 1 - tail))
    return float(lo), float(hi)


# --- formulas ---


def uniform_union(experts: int, top_k: int, tokens: float) -> float:
    """Expected distinct experts of a layer if every token chose its k uniformly: N (1 - (1 - k/N)^b)."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def expected_acceptance(agreement: float, draft_tokens: int = 4) -> float:
    """Accepted over drafted if each draft token agrees independently: (p + p^2 + ... + p^K) / K."""
    return sum(agreement**i for i in range(1, draft_tokens + 1)) / draft_tokens


def byte_bound(alpha: float, top_k: int, experts_per_layer: float) -> float:
    """Highest cold speedup when loading is all that costs: alpha k / E, with E over the cycle."""
    return alpha * top_k / experts_per_layer


def cycle_speedup(alpha: float, draft_tokens: int, draft_cost: float, verify_cost: float) -> float:
    """Speedup over AR that costs imply: alpha / (K d + v), d and v in one-token AR steps."""
    return alpha / (draft_tokens * draft_cost + verify_cost)


def ratio_from_draft_speedup(speedup: float, top_k: int) -> float:
    """L/x for which a top-1 draft step is `speedup` times as fast as a step of all `top_k`: (x + L)/(x + L/k)."""
    return (speedup - 1) / (1 - speedup / top_k)
