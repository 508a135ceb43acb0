"""Which nodes of a draft tree are worth verifying (EcoSpec, section 4.2, Algorithm 1).

Pure: no model, no store; shared by the runtime and the simulator. A choice looks at draft probabilities and at expert
sets of nodes, never at which token the target draws: otherwise sampled output would not follow the target.

An expert set is a bitmask: of each MoE layer W words of 64 bits, bit e of a layer for expert e. Costs are counted in
layer-experts (equation 4).

Shape suffixes: N nodes, F open nodes, L MoE layers, E experts a layer, k top-k, W words a layer, X = L W words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.tree import DraftTree, Floats, Ints
from moexp.runtime.selectors.chain import Truncation

Words = NDArray[np.uint64]

# --- expert sets ---


def pack_experts(ids: NDArray[np.integer], num_experts: int) -> Words:
    """Bitmasks [..., W] of sets given as expert ids [..., k] below `num_experts`."""
    assert ids.size == 0 or 0 <= int(ids.min()) <= int(ids.max()) < num_experts
    width = -(-num_experts // 64) * 64
    sets = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1])
    member = np.zeros(len(sets) * width, dtype=bool)
    member[sets + np.arange(len(sets))[:, None] * width] = True
    words = np.packbits(member, bitorder="little").view("<u8").astype(np.uint64, copy=False)
    return words.reshape(*ids.shape[:-1], width // 64)


def unpack_experts(words: Words, num_experts: int) -> NDArray[np.bool_]:
    """Membership [..., E] of bitmasks [..., W]."""
    octets = np.ascontiguousarray(words).astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=num_experts, bitorder="little").astype(bool)


def count_experts(words: Words) -> Ints:
    """Layer-experts of bitmasks [..., L, W]."""
    return np.bitwise_count(words).sum(axis=(-2, -1), dtype=np.int64)


# --- the paper's quantities, for all nodes at once ---


def path_experts(tree: DraftTree, experts_NLW: Words) -> Words:
    """E_traj: the union of expert sets along each node's path from the root (equation 7)."""
    paths_NLW = experts_NLW.copy()
    for node, parent in enumerate(tree.parents_N[1:].tolist(), start=1):
        paths_NLW[node] |= paths_NLW[parent]
    return paths_NLW


def marginal_costs(paths_NLW: Words, covered_LW: Words) -> Ints:
    """Layer-experts that each path would add to those covered (equation 8)."""
    return count_experts(paths_NLW & ~covered_LW)


def scores(path_probs_N: Floats, costs_N: NDArray[np.integer], epsilon: float) -> Floats:
    """P / (cost + epsilon): equation 9 of marginal costs, equation 10 of whole paths.

    Exact monotone arithmetic: a child's score is never above its parent's, not even by rounding.
    """
    return path_probs_N / (costs_N + epsilon)


# --- strategies ---


@dataclass(frozen=True)
class Selection:
    """Nodes to verify.

    Attributes:
        nodes: in the order they were picked: the root first, parents before their children.
        costs: layer-experts that each newly brought when it was picked; None without expert sets.
        covered_LW: B, all that are covered after the last pick; None without expert sets.
    """

    nodes: tuple[int, ...]
    costs: tuple[int, ...] | None = None
    covered_LW: Words | None = None


class Selector(Protocol):
    """A strategy.

    Attributes:
        needs: which expert sets it looks at: none, those predicted before verification, or those that the target's
            router was recorded to choose (an upper bound for analysis, not a method to decode with).
    """

    @property
    def needs(self) -> Literal["none", "predicted", "recorded"]: ...

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        """Up to `gamma` nodes, prefix-closed, root first; arguments as for `select`."""


def select(
    selector: Selector,
    tree: DraftTree,
    gamma: int,
    experts_NLW: Words | None = None,
    covered_LW: Words | None = None,
) -> Selection:
    """Choose the nodes to verify.

    Args:
        selector: the strategy.
        tree: all candidates.
        gamma: nodes at most, the root included.
        experts_NLW: expert set of each node, the root's included. No set may be left empty for want of a prediction: an
            empty set costs nothing, and its node would outrank others.
        covered_LW: B_0, experts that cost nothing from the start: of the batch's rows before, or held in a cache.

    Raises:
        MoexpError: gamma below 1, or a strategy without the expert sets that it needs.
    """
    if gamma < 1:
        raise MoexpError(f"gamma = {gamma}", where="decode.gamma", valid="from 1: the root counts")
    if experts_NLW is None:
        if selector.needs != "none":
            raise MoexpError("selection by cost without expert sets", where="decode.selector", valid="with a predictor")
        return Selection(tuple(selector.pick(tree, gamma, None, None)))
    assert len(experts_NLW) == len(tree)
    nodes = selector.pick(tree, gamma, experts_NLW, covered_LW)
    start_1LW = np.zeros_like(experts_NLW[:1]) if covered_LW is None else covered_LW[None]
    covered_SLW = np.bitwise_or.accumulate(np.concatenate([start_1LW, experts_NLW[nodes]]), axis=0)
    costs = np.diff(count_experts(covered_SLW))
    return Selection(tuple(nodes), tuple(costs.tolist()), covered_SLW[-1])


class Confidence:
    """The likeliest nodes by P, as EAGLE takes them."""

    needs: Literal["none"] = "none"

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        return _likeliest_first(tree)[:gamma].tolist()


@dataclass(frozen=True)
class GlobalCost:
    """The best nodes by P over the cost of the whole path, whatever else was picked (equation 10).

    Args:
        epsilon: added to the cost, in layer-experts; above 0.
    """

    epsilon: float
    needs: ClassVar[Literal["predicted"]] = "predicted"

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        order_N = _likeliest_first(tree)
        score_N = scores(tree.path_probs_N, count_experts(path_experts(tree, experts_NLW)), self.epsilon)
        return order_N[np.argsort(-score_N[order_N], kind="stable")][:gamma].tolist()


@dataclass(frozen=True)
class MarginalCost:
    """One best node after another by P over the experts it adds (Algorithm 1, equations 7 to 9).

    The paper scores every node that is left by its whole path. No node scores above its parent, and ties go to the
    parent, so the best of all is always the best of the open ones, whose parents are picked already; and of an open
    node's path all experts but its own are covered. So only open nodes are scored, by their own sets. Among unrelated
    nodes ties go to the likelier one, then to the lower number.

    Args:
        epsilon: added to the cost, in layer-experts; above 0. The paper gives no value. When it is small, a node that
            adds nothing outranks all that add something, however unlikely it is.
        needs: "recorded" for the oracle.
    """

    epsilon: float
    needs: Literal["predicted", "recorded"] = "predicted"

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        own_NX = experts_NLW.reshape(len(tree), -1)
        missing_X = ~(np.zeros_like(own_NX[0]) if covered_LW is None else covered_LW.reshape(-1))
        order_N = _likeliest_first(tree)
        open_N = np.zeros(len(tree), dtype=bool)
        open_N[0] = True
        picked: list[int] = []
        while len(picked) < min(gamma, len(tree)):
            nodes_F = order_N[open_N[order_N]]
            added_FX = own_NX.take(nodes_F, axis=0) & missing_X
            costs_F = np.bitwise_count(added_FX).sum(axis=1, dtype=np.uint32)
            best = int(scores(tree.path_probs_N[nodes_F], costs_F, self.epsilon).argmax())
            node = int(nodes_F[best])
            picked.append(node)
            missing_X ^= added_FX[best]
            open_N[node] = False
            open_N[list(tree.children[node])] = True
        return picked


class Cheapest:
    """The `gamma` nodes that touch the fewest experts by the target's own routing, whatever their probability: a bound
    on what any selection can save, for analysis.

    Exact by search: every prefix-closed choice, but for those that cost more than the best so far before they are
    whole. Of equally cheap ones the likeliest stands. After `steps` extensions the best found so far is taken; trees of
    3 steps and width 4 need far fewer.
    """

    needs: Literal["recorded"] = "recorded"
    steps = 200_000

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        own = [int.from_bytes(words_LW.tobytes(), "little") for words_LW in experts_NLW]
        start = 0 if covered_LW is None else int.from_bytes(covered_LW.tobytes(), "little")
        size = min(gamma, len(tree))
        best: tuple[int, float, list[int]] | None = None
        left = self.steps

        def extend(picked: list[int], covered: int, open_: Sequence[int]) -> None:
            """All choices that have `picked`, and of `open_` no node before the one taken next."""
            nonlocal best, left
            cost = (covered & ~start).bit_count()
            if best is not None and (cost > best[0] or left <= 0):
                return
            if len(picked) == size:
                unlikely = -math.fsum(tree.path_probs_N[picked])
                best = min(best or (cost, unlikely, picked), (cost, unlikely, picked))
                return
            left -= 1
            for place, node in enumerate(open_):
                rest = (*open_[place + 1 :], *tree.children[node])
                extend([*picked, node], covered | own[node], rest)

        extend([0], start | own[0], tree.children[0])
        assert best is not None
        return [node for node in _likeliest_first(tree).tolist() if node in best[2]]


@dataclass(frozen=True)
class ChainTruncation:
    """A chain, cut off where its next token is not worth it (DraftExpert, equation 14; `select.Truncation`).

    A token is judged by its own probability (its draft's largest, at T = 1) and by the experts of the token before it,
    which are what the draft step that gave it predicted. The union starts empty, as in the paper, whatever is covered.

    Args:
        policy: a key of `select.POLICIES`.
        tau, budget, capacity: as for `select.Truncation`.

    Raises:
        MoexpError: an unknown policy; from `pick`, a tree that branches.
    """

    policy: str = "confidence-expansion"
    tau: float = 0.5
    budget: int | None = 60
    capacity: int | None = None
    needs: ClassVar[Literal["predicted"]] = "predicted"

    def __post_init__(self) -> None:
        Truncation(self.policy)

    def pick(self, tree: DraftTree, gamma: int, experts_NLW: Words | None, covered_LW: Words | None) -> list[int]:
        assert experts_NLW is not None
        if not tree.is_chain:
            raise MoexpError(f"{self.policy} on a tree", where="decode.selector", valid="a chain: a tree of width 1")
        truncation = Truncation(self.policy, self.tau, self.budget, self.capacity)
        confidences = np.exp(tree.log_probs_N)
        picked = [0]
        while len(picked) < min(gamma, len(tree)):
            if not truncation.offer(float(confidences[len(picked)]), _expert_numbers(experts_NLW[picked[-1]])):
                break
            picked.append(len(picked))
        return picked


@dataclass(frozen=True)
class SelectorOptions:
    """Numbers that strategies take, each as far as it needs them: see `MarginalCost` and `ChainTruncation`."""

    epsilon: float = 1.0
    tau: float = 0.5
    budget: int | None = 60
    capacity: int | None = None


SELECTORS: dict[str, Callable[[SelectorOptions], Selector]] = {
    "confidence": lambda options: Confidence(),
    "confidence-expansion": lambda options: ChainTruncation(
        "confidence-expansion", options.tau, options.budget, options.capacity
    ),
    "global-cost": lambda options: GlobalCost(options.epsilon),
    "marginal-cost": lambda options: MarginalCost(options.epsilon),
    "oracle": lambda options: MarginalCost(options.epsilon, needs="recorded"),
    "cheapest": lambda options: Cheapest(),
}


def make_selector(name: str, options: SelectorOptions) -> Selector:
    """The strategy of this name.

    Raises:
        MoexpError: an unknown name, or an epsilon that is not above 0.
    """
    if name not in SELECTORS:
        raise MoexpError(f"unknown selector {name!r}", where="decode.selector", valid=", ".join(sorted(SELECTORS)))
    return SELECTORS[name](options)


def _likeliest_first(tree: DraftTree) -> Ints:
    """Nodes by descending P; of equal ones the lower number, so that parents stand before their children."""
    return np.argsort(-tree.path_probs_N, kind="stable")


def _expert_numbers(words_LW: Words) -> set[int]:
    """The set's members as numbers that are unique over layers."""
    return set(np.flatnonzero(unpack_experts(words_LW, words_LW.shape[-1] * 64)).tolist())


def _check_epsilon(epsilon: float) -> None:
    if not epsilon > 0:
        raise MoexpError(f"epsilon = {epsilon}", where="decode.epsilon", valid="above 0")
