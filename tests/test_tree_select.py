"""Selection against a literal transcription of EcoSpec's Algorithm 1, its worked example, and what it promises."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.papers import load_paper
from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.selectors.confidence import Confidence
from moexp.runtime.selectors.confidence_expansion import ChainTruncation, Truncation
from moexp.runtime.selectors.expert_sets import count_experts, pack_experts, unpack_experts
from moexp.runtime.selectors.global_cost import GlobalCost, path_experts
from moexp.runtime.selectors.marginal_cost import MarginalCost
from moexp.runtime.selectors.registry import SELECTORS, SelectorOptions, make_selector
from moexp.runtime.selectors.selector import scores, select
from tests.trees import build, random_tree, renumbered, routing, trees

LAYERS, EXPERTS = 2, 70
EPSILONS = st.sampled_from([1e-6, 0.5, 1.0, 20.0])
SEEDS = st.integers(0, 2**32 - 1)
TREE_SELECTORS = sorted(set(SELECTORS) - {"confidence-expansion"})


def sets_of(words_NLW) -> list[set]:
    """Bitmasks as sets of (layer, expert)."""
    return [set(zip(*map(list, np.nonzero(row)), strict=True)) for row in unpack_experts(words_NLW, EXPERTS)]


def random_sets(nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Bitmasks of sets that overlap: from a handful of experts on both sides of a word's end."""
    return pack_experts(routing(nodes, LAYERS, 9, 2, rng) + 60, EXPERTS)


def path_sets(tree: DraftTree, experts_NLW) -> list[set]:
    own = sets_of(experts_NLW)
    return [set().union(*(own[above] for above in tree.path(node))) for node in range(len(tree))]


def marginal_costs(paths_NLW, covered_LW):
    """The paper's equation 8, as it stands."""
    return count_experts(paths_NLW & ~covered_LW)


def algorithm_1(tree, gamma, paths, covered, epsilon):
    """Literally: each node that is left is scored by its whole path, the best is taken, its path is covered."""
    selected: list[int] = []
    costs: list[int] = []
    covered = set(covered)
    while len(selected) < min(gamma, len(tree)):
        left = [node for node in range(len(tree)) if node not in selected]
        cost = {node: len(paths[node] - covered) for node in left}
        score = {node: tree.path_probs_N[node] / (cost[node] + epsilon) for node in left}
        for node in left:
            if tree.parents_N[node] in left:
                assert score[node] <= score[tree.parents_N[node]]
        best = max(left, key=lambda node: (score[node], tree.path_probs_N[node], -node))
        selected.append(best)
        costs.append(cost[best])
        covered |= paths[best]
    return selected, costs, covered


def test_the_papers_worked_example():
    example = load_paper("ecospec").figures[3]
    nodes, (first, second), result = example["nodes"], example["steps"], example["result"]
    names = list(nodes)
    tree = build([-1, 0, 0], [math.log(nodes[name]["p"]) for name in names])
    root = nodes["t0"]["experts"]
    own = [root, *(sorted(set(nodes[name]["path_experts"]) - set(root)) for name in ("t1", "t2"))]
    experts_NLW = np.stack([pack_experts(np.array([ids]), 9) for ids in own])
    paths_NLW = path_experts(tree, experts_NLW)

    def shown(buffer):
        covered_LW = pack_experts(np.array([buffer], dtype=int), 9)
        costs_N = marginal_costs(paths_NLW, covered_LW)
        return dict(zip(names, scores(tree.path_probs_N, costs_N, 1e-9).tolist(), strict=True))

    for step, digits in ((first, 1e-3), (second, 1e-2)):  # the paper cuts digits off
        found = {name: score for name, score in shown(step["buffer"]).items() if name in step["scores"]}
        assert found == pytest.approx(step["scores"], abs=digits)
        assert max(found, key=lambda name: found[name]) == step["picks"]
    selection = select(MarginalCost(1e-9), tree, 2, experts_NLW)
    assert [names[node] for node in selection.nodes] == result["selected"] == [first["picks"], second["picks"]]
    assert selection.costs == (4, 2)
    assert selection.covered_LW is not None
    assert np.flatnonzero(unpack_experts(selection.covered_LW, 9)[0]).tolist() == result["buffer"]
    assert select(Confidence(), tree, 2).nodes == (0, 1), "confidence takes t1"


@settings(max_examples=80)
@given(trees(), SEEDS, st.integers(1, 14), EPSILONS, st.booleans())
def test_marginal_cost_is_algorithm_1(tree, seed, gamma, epsilon, warm):
    rng = np.random.default_rng(seed)
    experts_NLW = random_sets(len(tree), rng)
    covered_LW = random_sets(1, rng)[0] if warm else None
    before = sets_of(covered_LW[None])[0] if covered_LW is not None else set()
    nodes, costs, covered = algorithm_1(tree, gamma, path_sets(tree, experts_NLW), before, epsilon)
    given_NLW, given_LW = experts_NLW.copy(), np.array(covered_LW)
    selection = select(MarginalCost(epsilon), tree, gamma, experts_NLW, covered_LW)
    assert list(selection.nodes) == nodes
    assert selection.costs == tuple(costs), "incremental costs against a recount of whole paths"
    assert selection.covered_LW is not None
    assert sets_of(selection.covered_LW[None])[0] == covered
    assert np.array_equal(experts_NLW, given_NLW)
    assert covered_LW is None or covered_LW.tolist() == given_LW.tolist(), "what was given is left alone"


@settings(max_examples=50)
@given(trees(), SEEDS, st.integers(1, 14), EPSILONS)
def test_global_cost_is_a_ranking_by_whole_paths(tree, seed, gamma, epsilon):
    experts_NLW = random_sets(len(tree), np.random.default_rng(seed))
    paths = path_sets(tree, experts_NLW)
    score = [float(tree.path_probs_N[node] / (len(paths[node]) + epsilon)) for node in range(len(tree))]
    ranked = sorted(range(len(tree)), key=lambda node: (-score[node], -tree.path_probs_N[node], node))
    assert list(select(GlobalCost(epsilon), tree, gamma, experts_NLW).nodes) == ranked[:gamma]


@settings(max_examples=50)
@given(trees(), st.integers(1, 14))
def test_confidence_is_a_ranking_by_probability(tree, gamma):
    ranked = sorted(range(len(tree)), key=lambda node: (-tree.path_probs_N[node], node))
    selection = select(Confidence(), tree, gamma)
    assert list(selection.nodes) == ranked[:gamma]
    assert selection.costs is None and selection.covered_LW is None, "not counted is not 0"


@pytest.mark.parametrize("name", TREE_SELECTORS)
@settings(max_examples=40)
@given(tree=trees(), seed=SEEDS, gamma=st.integers(1, 14), epsilon=EPSILONS)
def test_selections_are_prefix_closed_and_within_budget(name, tree, seed, gamma, epsilon):
    experts_NLW = random_sets(len(tree), np.random.default_rng(seed))
    selector = make_selector(name, SelectorOptions(epsilon=epsilon))
    selection = select(selector, tree, gamma, experts_NLW)
    nodes = selection.nodes
    assert len(nodes) == len(set(nodes)) == min(gamma, len(tree)), "all of the budget, no more"
    assert all(tree.is_prefix_closed(nodes[: count + 1]) for count in range(len(nodes)))
    assert selection.costs is not None and selection.covered_LW is not None
    assert sum(selection.costs) == count_experts(selection.covered_LW)
    assert set(select(selector, tree, len(tree), experts_NLW).nodes) == set(range(len(tree)))


@pytest.mark.parametrize("name", TREE_SELECTORS)
@settings(max_examples=30)
@given(nodes=st.integers(2, 14), seed=SEEDS, epsilon=EPSILONS)
def test_the_order_of_siblings_does_not_matter(name, nodes, seed, epsilon):
    rng = np.random.default_rng(seed)
    tree = random_tree(nodes, rng)
    experts_NLW = random_sets(nodes, rng)
    order = renumbered(tree, rng)
    selector = make_selector(name, SelectorOptions(epsilon=epsilon))
    gamma = int(rng.integers(1, nodes + 1))
    other = select(selector, tree.take(order), gamma, experts_NLW[order])
    assert tuple(order[node] for node in other.nodes) == select(selector, tree, gamma, experts_NLW).nodes


@settings(max_examples=50)
@given(trees(), SEEDS, EPSILONS)
def test_no_child_scores_above_its_parent(tree, seed, epsilon):
    rng = np.random.default_rng(seed)
    paths_NLW, covered_LW = path_experts(tree, random_sets(len(tree), rng)), random_sets(3, rng)[0]
    for costs_N in (marginal_costs(paths_NLW, covered_LW), count_experts(paths_NLW)):
        score_N = scores(tree.path_probs_N, costs_N, epsilon)
        assert (score_N[1:] <= score_N[tree.parents_N[1:]]).all()


@settings(max_examples=50)
@given(trees(), SEEDS)
def test_path_experts_and_costs_are_set_unions_and_differences(tree, seed):
    rng = np.random.default_rng(seed)
    experts_NLW, covered_LW = random_sets(len(tree), rng), random_sets(1, rng)[0]
    paths, covered = path_sets(tree, experts_NLW), sets_of(covered_LW[None])[0]
    paths_NLW = path_experts(tree, experts_NLW)
    assert sets_of(paths_NLW) == paths
    assert marginal_costs(paths_NLW, covered_LW).tolist() == [len(path - covered) for path in paths]


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(0, 5), st.integers(1, 3), SEEDS)
def test_bitmasks_hold_exactly_the_experts_given(num_experts, top_k, layers, seed):
    rng = np.random.default_rng(seed)
    ids_NLk = routing(4, layers, num_experts, top_k, rng).astype(np.int16)
    words_NLW = pack_experts(ids_NLk, num_experts)
    assert words_NLW.dtype == np.uint64 and words_NLW.shape == (4, layers, -(-num_experts // 64))
    member = unpack_experts(words_NLW, num_experts)
    ids_Rk, member_RE = ids_NLk.reshape(4 * layers, ids_NLk.shape[-1]), member.reshape(4 * layers, num_experts)
    for chosen, row in zip(ids_Rk, member_RE, strict=True):
        assert np.flatnonzero(row).tolist() == sorted(chosen.tolist())
    assert count_experts(words_NLW).tolist() == [layers * ids_NLk.shape[-1]] * 4


def test_bits_are_where_documented():
    words = pack_experts(np.array([[0, 63], [64, 69], [5, 5]]), EXPERTS)
    assert words.tolist() == [[1 | 1 << 63, 0], [0, 1 | 1 << 5], [1 << 5, 0]], "an id named twice counts once"
    with pytest.raises(AssertionError):
        pack_experts(np.array([[70]]), EXPERTS)


def test_with_a_small_epsilon_a_node_that_adds_nothing_outranks_every_other():
    tree = build([-1, 0, 0], [0.0, math.log(0.9), math.log(0.01)])
    experts_NLW = pack_experts(np.array([[[1, 2]], [[1, 3]], [[2, 1]]]), EXPERTS)
    assert select(MarginalCost(1e-6), tree, 2, experts_NLW).nodes == (0, 2)
    assert select(MarginalCost(1.0), tree, 2, experts_NLW).nodes == (0, 1)


def test_equal_scores_go_to_the_likelier_node_and_then_to_the_first():
    experts_NLW = pack_experts(np.array([[[1]], [[1]], [[2]]]), EXPERTS)
    tree = build([-1, 0, 0], [0.0, math.log(0.25), math.log(0.5)])
    assert scores(tree.path_probs_N, np.array([1, 0, 1]), 1.0).tolist() == [0.5, 0.25, 0.25]
    assert select(MarginalCost(1.0), tree, 2, experts_NLW).nodes == (0, 2)
    equal = build([-1, 0, 0], [0.0, -1.0, -1.0])
    for selector in (Confidence(), MarginalCost(1.0), GlobalCost(1.0)):
        assert select(selector, equal, 2, experts_NLW[[0, 1, 1]]).nodes == (0, 1)


def test_equal_scores_go_to_the_parent():
    """A child as likely as its parent, which adds nothing: only the order of numbers can tell them apart."""
    tree = build([-1, 0, 1, 2, 0], [0.0, -0.5, 0.0, 0.0, -0.5])
    experts_NLW = pack_experts(np.array([[[1]], [[2]], [[2]], [[1]], [[2]]]), EXPERTS)
    for name in TREE_SELECTORS:
        selector = make_selector(name, SelectorOptions(epsilon=1e-6))
        for gamma in range(1, 6):
            assert tree.is_prefix_closed(select(selector, tree, gamma, experts_NLW).nodes)


@settings(max_examples=30)
@given(st.integers(1, 12), SEEDS, st.integers(1, 12))
def test_where_costs_are_equal_or_negligible_confidence_decides(nodes, seed, gamma):
    rng = np.random.default_rng(seed)
    tree, experts_NLW = random_tree(nodes, rng), random_sets(nodes, rng)
    confident = select(Confidence(), tree, gamma).nodes
    everything_LW = np.bitwise_or.reduce(experts_NLW, axis=0)
    assert select(MarginalCost(1e-3), tree, gamma, experts_NLW, everything_LW).nodes == confident
    assert select(MarginalCost(1e12), tree, gamma, experts_NLW).nodes == confident
    assert select(GlobalCost(1e12), tree, gamma, experts_NLW).nodes == confident


@given(trees(), SEEDS, st.integers(1, 6), st.booleans())
def test_the_cheapest_choice_is_the_cheapest_of_all_that_are_prefix_closed(tree, seed, gamma, warm):
    rng = np.random.default_rng(seed)
    experts_NLW = random_sets(len(tree), rng)
    covered_LW = random_sets(1, rng)[0] if warm else None
    picked = select(make_selector("cheapest", SelectorOptions()), tree, gamma, experts_NLW, covered_LW)
    size = min(gamma, len(tree))
    assert len(picked.nodes) == size and tree.is_prefix_closed(picked.nodes)
    own = sets_of(experts_NLW)
    known = sets_of(covered_LW[None])[0] if covered_LW is not None else set()
    choices = [
        (0, *others)
        for others in itertools.combinations(range(1, len(tree)), size - 1)
        if all(tree.parents_N[node] in (0, *others) for node in others)
    ]
    assert sum(picked.costs or ()) == min(len(set().union(*(own[node] for node in nodes)) - known) for nodes in choices)


def test_the_search_for_the_cheapest_choice_ends_where_it_must(monkeypatch):
    rng = np.random.default_rng(0)
    tree, experts_NLW = random_tree(40, rng), random_sets(40, rng)
    monkeypatch.setattr("moexp.runtime.selectors.cheapest.Cheapest.steps", 50)
    nodes = select(make_selector("cheapest", SelectorOptions()), tree, 8, experts_NLW).nodes
    assert len(nodes) == 8 and tree.is_prefix_closed(nodes)


def test_experts_that_are_covered_from_the_start_cost_nothing():
    """A batch's second row, or experts held in a cache: they turn the choice."""
    tree = build([-1, 0, 0], [0.0, math.log(0.6), math.log(0.4)])
    experts_NLW = pack_experts(np.array([[[1, 2]], [[3, 4]], [[5, 6]]]), EXPERTS)
    assert select(MarginalCost(1.0), tree, 2, experts_NLW).nodes == (0, 1)
    covered_LW = pack_experts(np.array([[5, 6]]), EXPERTS)
    selection = select(MarginalCost(1.0), tree, 2, experts_NLW, covered_LW)
    assert selection.nodes == (0, 2) and selection.costs == (2, 0)


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from([0.0, -0.3, -0.8, -2.0]), max_size=8),
    SEEDS,
    st.floats(0, 1),
    st.integers(0, 6),
    st.integers(1, 10),
)
def test_confidence_expansion_cuts_a_chain_as_the_loop_over_drafted_tokens_does(log_probs, seed, tau, budget, gamma):
    tree = DraftTree.chain(1, [2] * len(log_probs), log_probs)
    experts_NLW = random_sets(len(tree), np.random.default_rng(seed))
    truncation = Truncation("confidence-expansion", tau, budget)
    kept = 0
    for log_prob, experts in zip(log_probs, sets_of(experts_NLW), strict=False):
        if kept == gamma - 1 or not truncation.offer(math.exp(log_prob), experts):
            break
        kept += 1
    selector = make_selector("confidence-expansion", SelectorOptions(tau=tau, budget=budget))
    assert select(selector, tree, gamma, experts_NLW).nodes == tuple(range(kept + 1))


def test_a_chains_token_is_judged_by_the_experts_of_the_token_before():
    tree = DraftTree.chain(1, [2, 3], [-1.0, -1.0])
    experts_NLW = pack_experts(np.array([[[1, 1, 1]], [[2, 3, 4]], [[1, 1, 1]]]), EXPERTS)
    assert select(ChainTruncation(tau=1.0, budget=1), tree, 3, experts_NLW).nodes == (0, 1)
    assert select(ChainTruncation(tau=1.0, budget=3), tree, 3, experts_NLW).nodes == (0, 1, 2)


def test_each_strategy_says_which_expert_sets_it_needs():
    needs = {name: make_selector(name, SelectorOptions()).needs for name in SELECTORS}
    assert needs == {
        "confidence": "none",
        "confidence-expansion": "predicted",
        "global-cost": "predicted",
        "marginal-cost": "predicted",
        "oracle": "recorded",
        "cheapest": "recorded",
    }


def test_what_cannot_be_selected_is_an_error():
    tree = build([-1, 0, 0], [0.0, -1.0, -2.0])
    experts_NLW = random_sets(3, np.random.default_rng(0))
    with pytest.raises(MoexpError, match="gamma = 0"):
        select(Confidence(), tree, 0)
    with pytest.raises(MoexpError, match="with a predictor"):
        select(MarginalCost(1.0), tree, 2)
    with pytest.raises(MoexpError, match="a chain"):
        select(ChainTruncation(), tree, 2, experts_NLW)
    with pytest.raises(MoexpError, match=", ".join(sorted(SELECTORS))):
        make_selector("best", SelectorOptions())
    for name in ("marginal-cost", "global-cost", "oracle"):
        for epsilon in (0.0, -1.0, math.nan):
            with pytest.raises(MoexpError, match="epsilon"):
                make_selector(name, SelectorOptions(epsilon=epsilon))


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [4, 16, 63])
def test_a_tree_of_64_nodes_over_58_layers_of_256_experts_takes_at_most_a_millisecond(gamma):
    rng = np.random.default_rng(0)
    tree = random_tree(64, rng)
    experts_NLW = pack_experts(routing(64, 58, 256, 8, rng), 256)
    selector = MarginalCost(1.0)
    best_s = math.inf
    for _ in range(2000):  # the best of many: the others are about what else the machine does
        begin_s = time.perf_counter()
        select(selector, tree, gamma, experts_NLW)
        best_s = min(best_s, time.perf_counter() - begin_s)
        if best_s <= 1e-3:
            break
    assert best_s <= 1e-3
