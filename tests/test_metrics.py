from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp import metrics as m
from moexp.metrics import Ratio
from moexp.records import RequestRecord, StepRecord


def step(request: int = 0, drafted: int = 4, accepted: int = 2, **values) -> StepRecord:
    tokens = list(range(accepted + 1))
    base = StepRecord(request, 0, "m", drafted, accepted, len(tokens), tokens, 0.1, 0.2, 0.4)
    return replace(base, **values)


steps_strategy = st.lists(
    st.integers(0, 6).flatmap(
        lambda drafted: st.builds(
            step,
            request=st.integers(0, 3),
            drafted=st.just(drafted),
            accepted=st.integers(0, drafted),
            unique_draft=st.none() | st.integers(0, 100),
            unique_verify=st.none() | st.integers(0, 100),
            union_layers=st.just(29),
        )
    ),
    max_size=20,
)

STEP_METRICS = [
    m.acceptance,
    m.alpha,
    m.unique_draft,
    m.unique_verify,
    m.experts_per_layer,
    m.router_agreement,
    m.draft_time,
    m.verify_time,
    m.token_time,
    m.prefetch_hit,
    m.prefetch_waste,
    m.prefetch_coverage,
    m.bytes_per_token,
    m.stall_per_token,
]


# --- sums, counts, and what is missing ---


@pytest.mark.parametrize("metric", STEP_METRICS)
def test_nothing_counted_is_none_not_zero(metric):
    assert metric([]).value is None


@pytest.mark.parametrize("metric", [m.prefetch_hit, m.prefetch_waste, m.prefetch_coverage, m.bytes_per_token])
def test_a_step_without_store_counters_says_nothing_about_the_store(metric):
    assert metric([step()]).value is None


def test_no_draft_has_no_acceptance_and_no_prefetch_has_no_hit_rate():
    ar = step(drafted=0, accepted=0, store={"prefetched": 0, "used": 0, "verify_demanded": 0})
    assert m.acceptance([ar]).value is None
    assert m.prefetch_hit([ar]).value is None
    assert m.prefetch_waste([ar]).value is None
    assert m.prefetch_coverage([ar]).value is None
    assert m.alpha([ar]).value == 1


@given(steps_strategy)
def test_metrics_of_parts_add_up_to_the_metric_of_the_whole(steps):
    for metric in STEP_METRICS:
        parts = m.pooled(metric(part) for part in m.by_request(steps).values())
        whole = metric(steps)
        assert (parts.num, parts.den) == pytest.approx((whole.num, whole.den))


@given(steps_strategy)
def test_acceptance_and_alpha_by_brute_force(steps):
    drafted, accepted = sum(s.drafted for s in steps), sum(s.accepted for s in steps)
    assert m.acceptance(steps) == Ratio(accepted, drafted)
    assert m.alpha(steps) == Ratio(sum(len(s.tokens) for s in steps), len(steps))
    value = m.acceptance(steps).value
    assert value is None if drafted == 0 else value == float(Fraction(accepted, drafted))


def test_a_mean_over_prompts_weighs_each_by_what_it_counted():
    steps = [step(0, 4, 4), step(1, 4, 0), step(1, 4, 0), step(1, 4, 0)]
    assert m.acceptance(steps).value == 0.25  # not the mean of 1.0 and 0.0


def test_experts_per_layer_is_the_union_over_the_layers_it_was_taken_in():
    steps = [step(unique_verify=58, union_layers=29), step(unique_verify=87, union_layers=29), step()]
    assert m.experts_per_layer(steps).value == 2.5
    assert m.unique_verify(steps).value == 72.5
    assert m.unique_draft(steps).value is None


def test_the_stores_counters_give_hit_waste_coverage_and_bytes():
    store = {
        "prefetched": 10,
        "used": 8,
        "wasted": 0,
        "demanded": 99,
        "verify_demanded": 16,
        "read_bytes": 600,
        "stall_s": 0.3,
    }
    steps = [step(accepted=2, store=store), step(accepted=2)]
    assert m.prefetch_hit(steps).value == 0.8
    assert m.prefetch_waste(steps) == Ratio(2, 10)
    assert m.prefetch_coverage(steps).value == 0.5
    assert m.bytes_per_token(steps).value == 200
    assert m.stall_per_token(steps).value == pytest.approx(0.1)


def test_the_parts_of_a_tokens_time_sum_to_it():
    steps = [
        step(store={"draft_stall_s": 0.04, "verify_stall_s": 0.05}),  # 0.1 s drafting, 0.2 s verifying of 0.4 s
        step(drafted=0, accepted=0, store={"ar_stall_s": 0.01}),
        step(),
    ]
    emitted = sum(one.emitted for one in steps)
    parts = m.time_profile(steps)
    assert list(parts) == list(m.TIME_PARTS)
    seconds = {part: (ratio.value or 0.0) * emitted for part, ratio in parts.items()}
    assert seconds == pytest.approx(
        {"draft_compute": 0.26, "draft_wait": 0.04, "verify_compute": 0.54, "verify_wait": 0.06, "rest": 0.3}
    )
    assert sum(seconds.values()) / emitted == pytest.approx(m.token_time(steps).value)
    assert all(ratio.value is None for ratio in m.time_profile([]).values())


def test_router_agreement_weighs_slots():
    steps = [step(router_overlap=6, router_slots=6), step(router_overlap=0, router_slots=18), step()]
    assert m.router_agreement(steps).value == 0.25


def test_verify_cost_and_speedup_compare_with_ar():
    ar = [step(drafted=0, accepted=0, cycle_s=0.1, verify_s=0.09) for _ in range(4)]
    assert m.verify_cost([step(verify_s=0.15), step(verify_s=0.25)], ar) == pytest.approx(2.0)
    assert m.verify_cost([step()], []) is None

    def request(tokens: int, decode_s: float) -> RequestRecord:
        return RequestRecord(0, "chat", "m", 5, tokens, 9.0, decode_s, "length", [0] * tokens)

    slow, fast = [request(10, 1.0), request(30, 3.0)], [request(10, 0.5), request(30, 1.5)]
    assert m.tokens_per_s(slow).value == pytest.approx(10)
    assert m.speedup(fast, slow) == pytest.approx(2.0)
    assert m.speedup(fast, []) is None
    assert m.quotient(Ratio(1, 1), Ratio(0, 1)) is None


def test_agreement_is_a_share_of_positions():
    assert m.agreement([1, 2, 3, 4], [1, 0, 3, 4]).value == 0.75
    assert m.agreement([], []).value is None
    with pytest.raises(ValueError, match="longer"):
        m.agreement([1], [1, 2])


# --- repeated n-grams ---


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_repeated_ngrams_by_brute_force(tokens, n):
    starts = range(len(tokens) - n + 1)
    repeats = sum(any(tokens[i : i + n] == tokens[j : j + n] for j in range(i)) for i in starts)
    assert m.repeated_ngrams([tokens], n) == Ratio(repeats, len(starts))


def test_repeated_ngrams_of_a_loop_of_varied_text_and_across_texts():
    assert m.repeated_ngrams([[1, 2] * 50], 4).value == pytest.approx(95 / 97)
    assert m.repeated_ngrams([list(range(50))], 4).value == 0
    assert m.repeated_ngrams([list(range(50))] * 2, 4).value == 0  # only within a text
    assert m.repeated_ngrams([[1, 2]], 4).value is None


# --- intervals ---

ratios_strategy = st.lists(st.builds(Ratio, st.integers(0, 50), st.integers(1, 50)), min_size=2, max_size=12)


@settings(max_examples=40)
@given(ratios_strategy)
def test_a_bootstrap_interval_is_ordered_within_the_prompts_range_and_repeatable(ratios):
    interval = m.bootstrap(ratios, samples=200, seed=3)
    values = [ratio.num / ratio.den for ratio in ratios]
    assert interval.lo is not None and interval.hi is not None
    assert min(values) - 1e-9 <= interval.lo <= interval.hi <= max(values) + 1e-9
    assert interval.value == m.pooled(ratios).value
    assert interval == m.bootstrap(ratios, samples=200, seed=3)


def test_equal_prompts_have_no_spread():
    interval = m.bootstrap([Ratio(3, 4)] * 8)
    assert interval.lo == interval.value == interval.hi == 0.75


def test_one_prompt_has_a_value_and_no_interval_and_none_has_neither():
    assert m.bootstrap([Ratio(3, 4)]) == (0.75, None, None, 1)
    assert m.bootstrap([]) == (None, None, None, 0)
    assert m.bootstrap([Ratio(), Ratio()]) == (None, None, None, 2)


def test_a_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        counts = rng.binomial(20, 0.6, size=30)
        interval = m.bootstrap([Ratio(int(c), 20) for c in counts], samples=300, seed=trial)
        assert interval.lo is not None and interval.hi is not None
        covered += interval.lo <= 0.6 <= interval.hi
    assert 0.88 <= covered / 200 <= 0.99


def test_a_quotient_draws_a_prompts_two_arms_together():
    # Prompts differ 100-fold in length, yet in each the method is exactly twice as fast: there is no spread.
    pairs = [(Ratio(2 * n, 1.0), Ratio(n, 1.0)) for n in (1, 10, 100)]
    interval = m.bootstrap_quotient(pairs, samples=500)
    assert interval.value == pytest.approx(2)
    assert interval.lo == pytest.approx(2) and interval.hi == pytest.approx(2)


# --- formulas ---


@given(st.integers(1, 256), st.data(), st.integers(1, 12))
def test_the_uniform_union_grows_from_k_and_stays_within_its_bounds(experts, data, tokens):
    top_k = data.draw(st.integers(1, experts))
    union = m.uniform_union(experts, top_k, tokens)
    assert m.uniform_union(experts, top_k, 1) == pytest.approx(top_k)
    assert union <= min(experts, top_k * tokens) + 1e-9
    assert union <= m.uniform_union(experts, top_k, tokens + 1) + 1e-9


def test_the_uniform_union_is_the_mean_over_all_choices():
    choices = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]  # top-2 of 4
    sizes = [len(set().union(*block)) for block in product(choices, repeat=3)]
    assert m.uniform_union(4, 2, 3) == pytest.approx(sum(sizes) / len(sizes))


def test_the_uniform_union_of_the_papers_geometries():
    assert m.uniform_union(256, 8, 4) == pytest.approx(30.53, abs=0.005)  # DeepSeek-V3.1, block of four
    assert m.uniform_union(64, 6, 5) == pytest.approx(24.88, abs=0.005)  # DeepSeek-V2-Lite, block of five


def test_agreement_implies_the_acceptance_the_paper_reports_for_top_1_and_not_for_draft_experts():
    assert m.expected_acceptance(0.477) == pytest.approx(0.216, abs=0.0005)  # table 3: 0.225
    assert m.expected_acceptance(0.87) == pytest.approx(0.71, abs=0.005)  # table 3: 0.85
    assert m.expected_acceptance(1.0) == 1
    assert m.expected_acceptance(0.0) == 0


@given(st.floats(0, 1), st.integers(1, 6))
def test_expected_acceptance_is_the_mean_of_independent_draws(p, k):
    expected = 0.0
    for draws in product((True, False), repeat=k):
        prefix = draws.index(False) if False in draws else k
        expected += prefix / k * p ** sum(draws) * (1 - p) ** (k - sum(draws))
    assert m.expected_acceptance(p, k) == pytest.approx(expected)


def test_the_byte_bound_and_the_speedup_that_costs_imply():
    assert m.byte_bound(4.4, 6, 18.3) == pytest.approx(1.44, abs=0.005)
    assert m.byte_bound(3.4, 6, 18.3) == pytest.approx(1.11, abs=0.005)
    assert m.cycle_speedup(4.4, 4, 1.05 / 4.7, 2.35) == pytest.approx(1.36, abs=0.005)
