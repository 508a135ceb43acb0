"""Draft trees against definitions written out by hand: paths, masks, sub-trees, and growth with a beam."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.draft_tree import DraftTree, TreeBuilder, TreeShape
from tests.trees import build, full_size, plane_trees, random_tree, renumbered, trees

SEEDS = st.integers(0, 2**32 - 1)


def ancestors(tree: DraftTree, node: int) -> set[int]:
    """The node and all above it, by the parents alone."""
    return {node} if node == 0 else {node} | ancestors(tree, int(tree.parents_N[node]))


@settings(max_examples=50)
@given(trees())
def test_masks_and_depths_follow_the_ancestor_relation(tree):
    mask_NN = tree.mask()
    for node in range(len(tree)):
        above = ancestors(tree, node)
        assert set(tree.path(node)) == above and tree.path(node)[0] == 0 and tree.path(node)[-1] == node
        assert set(np.flatnonzero(mask_NN[node])) == above
        assert tree.depths_N[node] == len(above) - 1
        assert tree.path_probs_N[node] == pytest.approx(math.exp(sum(tree.log_probs_N[list(above)])))


@settings(max_examples=50)
@given(trees())
def test_a_childs_probability_is_never_above_its_parents(tree):
    for node, parent in enumerate(tree.parents_N[1:], start=1):
        assert tree.path_probs_N[node] <= tree.path_probs_N[parent]
        assert node in tree.children[parent]
    assert sum(map(len, tree.children)) == len(tree) - 1


def test_a_childs_probability_is_never_above_its_parents_not_even_by_rounding():
    rng = np.random.default_rng(0)
    tree = DraftTree.chain(0, [1] * 300, (-rng.random(300) * 1e-15).tolist())
    assert (np.diff(tree.path_probs_N) <= 0).all()


@settings(max_examples=50)
@given(trees(), SEEDS)
def test_a_subtree_keeps_its_nodes_and_their_paths(tree, seed):
    rng = np.random.default_rng(seed)
    nodes = renumbered(tree, rng)[: rng.integers(1, len(tree) + 1)]
    assert tree.is_prefix_closed(nodes)
    for order, taken in [(nodes, tree.take(nodes)), (tree.depth_first(nodes), tree.take(tree.depth_first(nodes)))]:
        assert sorted(order) == sorted(nodes) and len(taken) == len(nodes)
        for at, node in enumerate(order):
            assert taken.tokens_N[taken.path(at)].tolist() == tree.tokens_N[tree.path(node)].tolist()
            assert taken.path_probs_N[at] == tree.path_probs_N[node]
            assert set(taken.path(at)) <= set(range(at + 1)), "parents stand before their children"


@settings(max_examples=50)
@given(trees(), st.sets(st.integers(0, 11), max_size=8))
def test_prefix_closed_means_that_every_path_is_held(tree, nodes):
    nodes = {node for node in nodes if node < len(tree)}
    closed = bool(nodes) and all(ancestors(tree, node) <= nodes for node in nodes)
    assert tree.is_prefix_closed(nodes) == closed
    if not closed:
        with pytest.raises(AssertionError):
            tree.depth_first(nodes)
        with pytest.raises(AssertionError):
            tree.take(sorted(nodes))


@settings(max_examples=50)
@given(trees())
def test_depth_first_begins_with_the_path_of_likeliest_children(tree):
    order, at = tree.depth_first(), 0
    while below := tree.children[order[at]]:
        at += 1
        assert order[at] == max(below, key=lambda child: (tree.path_probs_N[child], -child))
    mask = tree.take(order).mask()
    assert np.array_equal(mask[: at + 1, : at + 1], np.tri(at + 1, dtype=bool)), "a chain's own mask"


def test_a_chain_is_a_tree():
    chain = DraftTree.chain(7, [8, 8, 9], [-0.5, 0.0, -1.0])
    assert chain.is_chain and len(chain) == 4
    assert chain.tokens_N.tolist() == [7, 8, 8, 9] and chain.depths_N.tolist() == [0, 1, 2, 3]
    assert np.array_equal(chain.mask(), np.tri(4, dtype=bool))
    assert chain.depth_first() == [0, 1, 2, 3]
    assert not build([-1, 0, 0], [0, -1, -1]).is_chain
    assert DraftTree.chain(7, [], []).is_chain


@pytest.mark.parametrize(
    ("parents", "log_probs", "tokens"),
    [
        ([-1, 0, 0], [0, -1, -1], [5, 6, 6]),
        ([-1, 2, 0], [0, -1, -1], None),
        ([-1, -1], [0, -1], None),
        ([0, 0], [0, -1], None),
        ([-1, 0], [0, 1e-9], None),
        ([-1, 0], [0, math.nan], None),
        ([-1, 0], [-1, -1], None),
        ([], [], None),
    ],
)
def test_what_is_no_tree_is_refused(parents, log_probs, tokens):
    with pytest.raises(AssertionError):
        build(parents, log_probs, tokens)


def test_a_tree_cannot_be_changed():
    tree = random_tree(5, np.random.default_rng(0))
    for array in (tree.tokens_N, tree.parents_N, tree.log_probs_N, tree.depths_N, tree.path_probs_N):
        with pytest.raises(ValueError, match="read-only"):
            array[1] = 0


def test_there_are_as_many_ordered_trees_as_catalan_says():
    assert [len(list(plane_trees(nodes))) for nodes in range(1, 7)] == [1, 1, 2, 5, 14, 42]


# --- growth ---


def drafter(prefix: tuple[int, ...], width: int) -> tuple[list[int], list[float]]:
    """A made-up draft model's likeliest tokens after a prefix."""
    rng = np.random.default_rng([len(prefix), *prefix])
    logits = rng.normal(size=12) * 2
    log_probs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-log_probs)[:width]
    return best.tolist(), log_probs[best].tolist()


def grow(shape: TreeShape) -> TreeBuilder:
    builder = TreeBuilder(3, shape)
    while not builder.done:
        tree = builder.tree
        prefixes = [tuple(tree.tokens_N[tree.path(node)].tolist()) for node in builder.expanded]
        answers = [drafter(prefix, shape.width) for prefix in prefixes]
        builder.extend(np.array([tokens for tokens, _ in answers]), np.array([probs for _, probs in answers]))
    return builder


def grown_by_hand(shape: TreeShape) -> dict[tuple[int, ...], float]:
    """The same tree as path -> probability."""
    nodes: dict[tuple[int, ...], float] = {(3,): 1.0}
    expanded = list(nodes)
    for _ in range(shape.steps):
        candidates: dict[tuple[int, ...], float] = {}
        for prefix in expanded:
            for token, log_prob in zip(*drafter(prefix, shape.width), strict=True):
                candidates[*prefix, token] = nodes[prefix] * math.exp(log_prob)
        expanded = sorted(candidates, key=lambda path: -candidates[path])[: shape.beam]
        nodes |= {path: candidates[path] for path in expanded} if shape.pruned else candidates
    return nodes


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize(("steps", "width", "beam"), [(3, 2, 2), (1, 3, 1), (4, 1, 3), (3, 3, 5), (2, 4, 2), (5, 2, 1)])
def test_growing_expands_the_likeliest_of_each_step(steps, width, beam, pruned):
    shape = TreeShape(steps, width, beam, pruned)
    tree = grow(shape).tree
    found = {
        tuple(tree.tokens_N[tree.path(node)].tolist()): float(tree.path_probs_N[node]) for node in range(len(tree))
    }
    assert found == pytest.approx(grown_by_hand(shape))
    assert len(tree) == full_size(shape)


def test_the_papers_shape():
    """3 steps, top-2: all candidates of a step, or only those kept."""
    assert full_size(TreeShape()) == 1 + 2 + 4 + 4
    assert full_size(TreeShape(pruned=True)) == 1 + 2 + 2 + 2
    assert grow(TreeShape(steps=4, width=1, beam=1)).tree.is_chain


def test_nodes_keep_their_numbers_while_the_tree_grows():
    builder = TreeBuilder(3, TreeShape(steps=2))
    builder.extend(np.array([[4, 5]]), np.array([[-1.0, -0.5]]))
    assert builder.tree.tokens_N.tolist() == [3, 4, 5] and builder.expanded == [2, 1]
    builder.extend(np.array([[6, 7], [6, 8]]), np.array([[-1.0, -2.0], [1e-7, -3.0]]))
    assert builder.tree.tokens_N.tolist() == [3, 4, 5, 6, 7, 6, 8]
    assert builder.tree.parents_N.tolist() == [-1, 0, 0, 2, 2, 1, 1]
    assert builder.tree.log_probs_N[5] == 0, "rounding of the draft's log-softmax"
    assert builder.done
    with pytest.raises(AssertionError):
        builder.extend(np.array([[1], [2]]), np.array([[-1.0], [-1.0]]))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"width": 0}, {"beam": -1}])
def test_a_shape_below_one_is_refused(wrong):
    with pytest.raises(MoexpError, match=next(iter(wrong))):
        TreeShape(**wrong)
