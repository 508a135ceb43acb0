"""Verification: greedy matching, and speculative sampling checked by enumerating everything that can happen."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moexp.base.errors import MoexpError
from moexp.runtime.verifiers.chain import Verdict, residual, verify_greedy, verify_sampled
from moexp.runtime.verifiers.sampling import Sampler, Sampling, draw, probabilities
from tests.branches import Branches

TOKENS = st.integers(0, 3)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=7), TOKENS)
def test_greedy_accepts_the_common_prefix_and_adds_the_targets_token(pairs, last):
    draft, target = [d for d, _ in pairs], [t for _, t in pairs] + [last]
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert verify_greedy(draft, target) == Verdict.of_chain(common, target[common])


def random_language(seed, vocab, sampling, sharpness=2.0):
    """prefix -> distribution: a random next-token model."""

    def next_token(prefix):
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % (1 << 31))
        return probabilities(torch.randn(vocab, generator=generator) * sharpness, sampling)

    return next_token


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=1.0, top_k=2),
        Sampling(temperature=1.3, top_p=0.7),
        Sampling(temperature=0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocab", "drafts"), [(3, 3), (4, 2), (5, 1), (3, 0)])
def test_chain_speculative_sampling_follows_the_target_exactly(vocab, drafts, sampling, seed):
    target, drafter = random_language(seed, vocab, sampling), random_language(seed + 100, vocab, sampling)

    def program(branches):
        draft: list[int] = []
        q: list[torch.Tensor] = []
        for _ in range(drafts):
            q.append(drafter(tuple(draft)))
            draft.append(branches.draw(q[-1]))
        p = [target(tuple(draft[:i])) for i in range(drafts + 1)]
        verdict = verify_sampled(draft, q, p, branches.flip, branches.draw)
        emitted = draft[: verdict.accepted] + [verdict.bonus]
        while len(emitted) <= drafts:  # go on with the target alone, so that all outcomes are equally long
            emitted.append(branches.draw(target(tuple(emitted))))
        return tuple(emitted)

    found = dict.fromkeys(itertools.product(range(vocab), repeat=drafts + 1), 0.0)
    for weight, emitted in Branches().outcomes(program):
        found[emitted] += weight
    for emitted, weight in found.items():
        expected = math.prod(float(target(emitted[:i])[token]) for i, token in enumerate(emitted))
        assert weight == pytest.approx(expected, abs=1e-6)


def test_the_enumeration_can_fail():
    """Accepting a draft greedily while it was sampled is a known mistake: it must show."""
    target = random_language(0, 3, Sampling(temperature=1.0))
    p = [target(()), target((0,))]

    def wrong(branches):
        token = branches.draw(torch.tensor([0.8, 0.1, 0.1]))
        return verify_sampled([token], [torch.tensor([1.0, 1e-9, 1e-9])], p, branches.flip, branches.draw).bonus

    found = torch.zeros(3, dtype=torch.float64)
    for weight, token in Branches().outcomes(wrong):
        found[token] += weight
    assert not torch.allclose(found, p[0], atol=1e-2)


LOGITS = arrays("float32", st.integers(2, 12), elements=st.floats(-8, 8, width=32))


@given(LOGITS, st.floats(0.1, 3), st.integers(0, 14), st.one_of(st.just(1.0), st.floats(0.05, 1, exclude_max=True)))
def test_probabilities_are_temperature_then_top_k_then_top_p(logits, temperature, top_k, top_p):
    got = probabilities(torch.from_numpy(logits), Sampling(temperature, top_k, top_p)).tolist()
    full = [math.exp((float(x) - float(max(logits))) / temperature) for x in logits]
    ranked = sorted(range(len(full)), key=lambda i: (-full[i], i))
    kept = ranked[:top_k] if top_k else ranked
    mass = sum(full[i] for i in kept)
    chosen, reached = [], 0.0
    for i in kept:
        if reached >= top_p and top_p < 1:
            break
        chosen.append(i)
        reached += full[i] / mass
    near = abs(reached - top_p) < 1e-9  # whether one more belongs to it is then a matter of rounding
    if not near:
        assert [i for i, p in enumerate(got) if p > 0] == sorted(i for i in chosen if full[i] / mass > 1e-300)
        total = sum(full[i] for i in chosen)
        assert got == pytest.approx([full[i] / total if i in chosen else 0.0 for i in range(len(full))], abs=1e-9)
    assert sum(got) == pytest.approx(1)


def test_greedy_puts_everything_on_the_lowest_best_id():
    assert probabilities(torch.tensor([1.0, 3.0, 3.0]), Sampling()).tolist() == [0, 1, 0]


@given(
    arrays("float64", 6, elements=st.floats(0, 1)).filter(lambda x: x.sum() > 0.01), st.floats(0, 1, exclude_max=True)
)
def test_draw_is_the_inverse_of_the_cumulative_distribution(weights, uniform):
    probs = torch.from_numpy(weights / weights.sum())
    token = draw(probs, uniform)
    assert probs[token] > 0
    assert float(probs[:token].sum()) <= uniform + 1e-12
    assert uniform <= float(probs[: token + 1].sum()) + 1e-12


def test_residual_of_equal_distributions_is_the_distribution_itself():
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)


def test_a_seed_repeats_its_draws():
    def draws(seed):
        sampler = Sampler(seed)
        return [sampler.uniform() for _ in range(5)]

    assert draws(1) == draws(1) != draws(2)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}])
def test_sampling_out_of_range_is_refused(wrong):
    with pytest.raises(MoexpError, match=next(iter(wrong))):
        Sampling(**wrong)
