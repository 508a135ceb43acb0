"""Verification of trees: greedy walks, and sampling checked by enumerating everything that can happen."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.verifiers.chain import Verdict, verify_greedy, verify_sampled
from moexp.runtime.verifiers.sampling import Sampler, Sampling, probabilities
from moexp.runtime.verifiers.tree import verify_tree, verify_tree_greedy, verify_tree_sampled
from tests.branches import Branches
from tests.trees import build, plane_trees, renumbered, trees

VOCAB = 6
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_p=0.8),
    Sampling(temperature=1.3, top_k=3),
    Sampling(temperature=0.0),
]


def language(seed: int, sampling: Sampling, vocab: int = VOCAB):
    """prefix -> distribution of a random next-token model."""

    @cache
    def next_token(prefix: tuple[int, ...]) -> torch.Tensor:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        return probabilities(torch.from_numpy(rng.normal(size=vocab) * 1.5), sampling)

    return next_token


def random_tokens(parents: list[int], rng: np.random.Generator, vocab: int = VOCAB) -> DraftTree:
    """A tree with these parents, siblings of random different tokens."""
    tokens = [0] * len(parents)
    for parent in set(parents):
        siblings = [node for node, above in enumerate(parents) if above == parent]
        for node, token in zip(siblings, rng.permutation(vocab), strict=False):
            tokens[node] = int(token)
    return build(parents, [0.0, *[-1.0] * (len(parents) - 1)], tokens)


def prefix_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens_N[tree.path(node)[1:]].tolist())


def outcomes(tree: DraftTree, target, verify=verify_tree_sampled) -> dict[tuple[int, ...], float]:
    """Emitted tokens -> probability, of everything that verification can do."""

    def program(branches):
        return tuple(
            verify(tree, lambda n: target(prefix_of(tree, n)), branches.flip, branches.draw).tokens(
                tree.tokens_N.tolist()
            )
        )

    found: dict[tuple[int, ...], float] = {}
    for weight, emitted in Branches().outcomes(program):
        found[emitted] = found.get(emitted, 0.0) + weight
    return found


def probability(target, tokens: tuple[int, ...]) -> float:
    """Of the target, token by token."""
    return math.prod(float(target(tokens[:at])[token]) for at, token in enumerate(tokens))


def first_tokens(found: dict[tuple[int, ...], float], target, count: int) -> dict[tuple[int, ...], float]:
    """Distribution of the first tokens, where the target alone goes on behind what was emitted."""
    result = dict.fromkeys(itertools.product(range(VOCAB), repeat=count), 0.0)
    for emitted, weight in found.items():
        for rest in itertools.product(range(VOCAB), repeat=max(0, count - len(emitted))):
            whole = (*emitted, *rest)
            result[whole[:count]] += weight * probability(target, whole) / probability(target, emitted)
    return result


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("nodes", range(1, 7))
def test_every_tree_follows_the_target_exactly(nodes, sampling):
    rng = np.random.default_rng(nodes)
    for seed, parents in enumerate(plane_trees(nodes)):
        tree, target = random_tokens(parents, rng), language(seed, sampling)
        found = outcomes(tree, target)
        # What is emitted ends where the tree does, so no outcome begins another: probabilities compare one by one.
        assert sum(found.values()) == pytest.approx(1, abs=1e-12)
        for emitted, weight in found.items():
            assert weight == pytest.approx(probability(target, emitted), abs=1e-12)
        two = first_tokens(found, target, 2)
        for emitted, weight in two.items():
            assert weight == pytest.approx(probability(target, emitted), abs=1e-9)
        for token in range(VOCAB):
            first = sum(weight for emitted, weight in two.items() if emitted[0] == token)
            assert first == pytest.approx(float(target(())[token]), abs=1e-9)


def test_the_enumeration_can_fail():
    """Siblings tried without renormalising is a known mistake: it must show."""

    def wrong(tree, p_at, flip, draw_from):
        p_V = p_at(0).clone()
        for child in tree.children[0]:
            token = int(tree.tokens_N[child])
            if flip(float(p_V[token])):
                return Verdict((0,), token)
            p_V[token] = 0
        return Verdict((0,), draw_from(p_V / p_V.sum()))

    tree, target = random_tokens([-1, 0, 0], np.random.default_rng(0)), language(0, SAMPLINGS[0])
    found = outcomes(tree, target, wrong)
    assert max(abs(weight - probability(target, emitted)) for emitted, weight in found.items()) > 1e-2


def test_the_order_of_siblings_does_not_change_the_distribution():
    rng = np.random.default_rng(5)
    tree, target = random_tokens([-1, 0, 0, 0, 2, 2], rng), language(1, SAMPLINGS[0])
    assert outcomes(tree.take(renumbered(tree, rng)), target) == pytest.approx(outcomes(tree, target), abs=1e-12)


def test_a_token_that_the_target_excludes_is_never_accepted():
    target = language(0, Sampling(temperature=1.0, top_k=2))
    tree = random_tokens([-1, *[0] * VOCAB], np.random.default_rng(0))
    found = outcomes(tree, target)
    assert {emitted[0] for emitted in found} == set(torch.nonzero(target(())).flatten().tolist())


def test_a_root_alone_gives_one_token_of_the_target():
    target = language(0, SAMPLINGS[0])
    found = outcomes(build([-1], [0.0]), target)
    assert found == pytest.approx({(token,): float(target(())[token]) for token in range(VOCAB)})


def test_a_rejection_that_leaves_nothing_is_rounding():
    p_V = torch.tensor([0.0, 1 - 1e-16, 0.0], dtype=torch.float64)
    tree = build([-1, 0], [0.0, -1.0], [0, 1])
    flips = iter([False])  # a uniform number above even a probability of almost 1
    verdict = verify_tree_sampled(tree, lambda node: p_V, lambda p: next(flips), lambda p_V: int(p_V.argmax()))
    assert verdict == Verdict((0, 1), 1)


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
@settings(max_examples=20)
@given(tokens=st.lists(st.integers(0, VOCAB - 1), max_size=4), seed=st.integers(0, 99))
def test_a_chain_shaped_tree_is_the_chain_path(sampling, tokens, seed):
    """With the same uniform numbers, against chain sampling from one-hot draft distributions."""
    target = language(seed, sampling)
    tree = DraftTree.chain(0, tokens, [-1.0] * len(tokens))
    p = [target(tuple(tokens[:at])) for at in range(len(tokens) + 1)]
    q = list(torch.eye(VOCAB, dtype=torch.float64)[tokens])
    for draws in range(4):
        one, other = Sampler(draws), Sampler(draws)
        verdict = verify_tree_sampled(tree, p.__getitem__, one.flip, one.draw)
        assert verdict == verify_sampled(tokens, q, p, other.flip, other.draw)
        assert verdict.path == tuple(range(verdict.accepted + 1))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), st.integers(0, 2))
def test_a_chain_shaped_tree_is_the_chain_path_when_greedy(pairs, last):
    draft, target = [token for token, _ in pairs], [token for _, token in pairs] + [last]
    verdict = verify_tree_greedy(DraftTree.chain(9, draft, [-1.0] * len(draft)), target)
    assert verdict == verify_greedy(draft, target)


@settings(max_examples=50)
@given(trees(), st.data())
def test_greedy_emits_what_the_target_alone_would(tree, data):
    target = []
    for node in range(len(tree)):
        known = [int(tree.tokens_N[child]) for child in tree.children[node]]
        target.append(data.draw(st.sampled_from([*known, 7])))
    verdict = verify_tree_greedy(tree, target)
    node, emitted = 0, []
    while True:  # the target alone, for as long as the tree knows what it says
        emitted.append(target[node])
        after = [child for child in tree.children[node] if tree.tokens_N[child] == target[node]]
        if not after:
            break
        node = after[0]
    assert verdict.tokens(tree.tokens_N.tolist()) == emitted
    assert list(verdict.path) == tree.path(node) and verdict.accepted == len(emitted) - 1
    assert verdict.bonus == emitted[-1]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampling_parameters_are_applied_to_the_targets_logits(sampling):
    rng = np.random.default_rng(2)
    tree = random_tokens([-1, 0, 0, 1, 1, 2], rng)
    logits_NV = torch.from_numpy(rng.normal(size=(len(tree), VOCAB)).astype(np.float32))
    p_NV = probabilities(logits_NV, sampling)
    seen = set()
    for seed in range(30):
        verdict = verify_tree(tree, logits_NV, sampling, Sampler(seed))
        sampler = Sampler(seed)
        assert verdict == verify_tree_sampled(tree, p_NV.__getitem__, sampler.flip, sampler.draw)
        seen.add(verdict)
    assert len(seen) == 1 if sampling.greedy else len(seen) > 3
