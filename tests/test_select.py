"""Truncation against a transcription of Algorithm 1, and what the policies promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.runtime.selectors.confidence_expansion import POLICIES, Truncation

STEPS = st.lists(
    st.tuples(st.floats(0, 1), st.sets(st.integers(0, 30), min_size=1, max_size=10)), min_size=1, max_size=8
)


def kept(steps, *args):
    truncation = Truncation(*args)
    count = 0
    for confidence, experts in steps:
        if not truncation.offer(confidence, experts):
            break
        count += 1
    return count, truncation.union


def algorithm_1(steps, tau, budget):
    """Lines 1 to 15 of the paper's Algorithm 1, literally."""
    draft: list[int] = []
    union: set[int] = set()
    for i, (confidence, experts) in enumerate(steps):
        union_i = union | experts
        delta = len(union_i) - len(union)
        if confidence < tau and delta > budget:
            break
        draft.append(i)
        union = union_i
    return len(draft), union


@given(STEPS, st.floats(0, 1), st.integers(0, 12))
def test_confidence_expansion_is_algorithm_1(steps, tau, budget):
    assert kept(steps, "confidence-expansion", tau, budget) == algorithm_1(steps, tau, budget)


@given(STEPS, st.floats(0, 1), st.integers(0, 12))
def test_fixed_keeps_all_and_confidence_looks_at_tau_alone(steps, tau, budget):
    assert kept(steps, "fixed", tau, budget)[0] == len(steps)
    until = next((i for i, (confidence, _) in enumerate(steps) if confidence < tau), len(steps))
    assert kept(steps, "confidence", tau, budget)[0] == until


@given(STEPS, st.floats(0, 1), st.integers(0, 12))
def test_expansion_only_ever_saves_tokens_that_confidence_drops(steps, tau, budget):
    assert kept(steps, "confidence", tau, budget)[0] <= kept(steps, "confidence-expansion", tau, budget)[0]
    assert kept(steps, "confidence-expansion", tau, -1) == kept(steps, "confidence", tau, budget)
    assert kept(steps, "confidence-expansion", tau, 10)[0] == len(steps), "no step brings more than 10"


@given(STEPS, st.floats(0, 1), st.integers(0, 40))
def test_budget_from_the_cache_is_the_room_that_is_left(steps, tau, capacity):
    count, union = kept(steps, "confidence-expansion", tau, None, capacity)
    confidence, experts = steps[count] if count < len(steps) else (1.0, set())
    if count < len(steps):
        assert confidence < tau
        assert len(experts - union) > max(0, capacity - len(union))
    assert kept(steps, "confidence-expansion", tau, None, None)[0] == len(steps), "an unlimited cache"


def test_the_first_token_can_be_dropped():
    assert kept([(0.1, {1, 2})], "confidence-expansion", 0.5, 1) == (0, set())
    assert kept([(0.1, {1, 2})], "confidence-expansion", 0.5, 2) == (1, {1, 2})
    assert kept([(0.5, {1, 2})], "confidence-expansion", 0.5, 1) == (1, {1, 2}), "q = tau is not doubtful"


def test_an_unknown_policy_lists_those_there_are():
    with pytest.raises(MoexpError, match=", ".join(sorted(POLICIES))):
        Truncation("best")
