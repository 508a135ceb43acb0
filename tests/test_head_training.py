"""Training of draft heads: the mask of several draft steps against decoding step by step, losses, trees, resuming."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from moexp.base.errors import MoexpError
from moexp.learn.core.loop import Metrics, Run, Schedule
from moexp.learn.heads.chains import Chains, TargetPass, chain_mask
from moexp.learn.heads.draft_tree import Trees, accepted_paths, grow_trees, read_target, tree_rewards
from moexp.learn.heads.gto import (
    TreeSettings,
    clipped_surrogate,
    group_advantages,
    group_roots,
    path_log_likelihood,
    tree_loss,
)
from moexp.learn.heads.loss import head_loss, read_teacher
from moexp.learn.heads.start import start_by_least_squares
from moexp.learn.heads.train import measure_head, train_head
from moexp.learn.heads.unrolled import HeadSettings, unrolled_loss
from moexp.target.heads.eagle_head import EagleHead
from moexp.target.heads.eagle_head import start_from_target as start_eagle
from moexp.target.heads.head import HeadCache, frozen_copy
from moexp.target.heads.mtp_head import MtpHead, new_mtp_head
from moexp.target.heads.mtp_head import start_from_target as start_mtp
from tests.heads import small_eagle
from tests.tiny_models import random_rows, tiny_folder, whole_model

pytestmark = pytest.mark.e2e

DRAFTED = list(range(0, 256, 2))
SHORT = Schedule(steps=4, lr=3e-3, warmup=1)
PLAIN = HeadSettings(SHORT, steps=3, rows=2, autocast=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return whole_model(tiny_folder(tmp_path_factory.mktemp("target")))


def any_head(kind: str, model: Any) -> EagleHead | MtpHead:
    head = small_eagle(model, DRAFTED) if kind == "eagle" else new_mtp_head(model, seed=1)
    return head.requires_grad_(False)


# --- the mask of several steps ---


def one_chain(head: Any, rows_1L: Tensor, features: Tensor, root: int, steps: int) -> list[Tensor]:
    """The states of one chain as a drafter makes them: pairs one by one into a cache, then its own states."""
    cache = HeadCache(capacity=2)
    hidden = head.features(features)
    for t in range(root + 1):
        state = head(rows_1L[:, t + 1 : t + 2], hidden[:, t : t + 1], torch.tensor([[t]]), None, cache)
    states = [state]
    for step in range(1, steps):
        token = rows_1L[:, root + 1 + step : root + 2 + step]
        states.append(head(token, states[-1], torch.tensor([[root + step]]), None, cache))
    return states


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_training_on_all_positions_at_once_is_decoding_from_each(kind: str, model: Any):
    head = any_head(kind, model)
    rows = random_rows(2, 9).long()
    seen = TargetPass(model, head.feature_layers)(rows)
    steps = 4
    chains = Chains(head, rows, seen.features_BLF)
    states = [chains.hidden]
    for step in range(1, steps):
        tokens = torch.stack([rows[:, min(t + 1 + step, 8)] for t in range(8)], dim=1)
        states.append(chains.extend(tokens))
    for row, root in itertools.product(range(2), range(8)):
        live = min(steps, 8 - root)
        alone = one_chain(head, rows[row : row + 1], seen.features_BLF[row : row + 1], root, live)
        for step, wanted in enumerate(alone):
            assert torch.allclose(states[step][row, root], wanted[0, 0], atol=2e-5), (row, root, step)


def test_chains_from_some_roots_are_those_chains(model: Any):
    head = any_head("eagle", model)
    rows = random_rows(2, 9).long()
    chains = Chains(head, rows, TargetPass(model, head.feature_layers)(rows).features_BLF)
    whole, some = chains.fork(), chains.fork(torch.tensor([1, 4, 5]))
    tokens = random_rows(2, 16, seed=5).long().view(2, 8, 2)
    for step in range(2):
        wanted = whole.extend(tokens[..., step])[:, [1, 4, 5]]
        assert torch.allclose(some.extend(tokens[:, [1, 4, 5], step]), wanted, atol=1e-5)
    assert chains.depth == 0 and chains.cache.length == 8


def test_the_mask_says_who_sees_whom():
    mask = chain_mask(torch.tensor([0, 2]), pairs=3, depth=2).int().tolist()
    assert mask == [[1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0, 1]]


def test_features_are_the_outputs_of_the_layers_named(model: Any):
    rows = random_rows(2, 6).long()
    whole = model.model(input_ids=rows, output_hidden_states=True)
    seen = TargetPass(model, (0, 1, 1))(rows)
    wanted = torch.cat([whole.hidden_states[1], whole.hidden_states[2], whole.hidden_states[2]], dim=-1)
    assert torch.allclose(seen.features_BLF, wanted, atol=1e-5)
    assert torch.allclose(seen.final_BLH, whole.last_hidden_state, atol=1e-5)
    assert TargetPass(model, ())(rows).features_BLF.shape == (2, 6, 32)


# --- losses ---


def test_the_head_loss_is_what_autograd_makes_of_the_plain_formulas():
    torch.manual_seed(0)
    tokens, hidden, vocab = 150, 12, 40  # more tokens than one chunk
    drafted = torch.arange(3, 40, 4)
    table = torch.full((vocab,), -1)
    table[drafted] = torch.arange(len(drafted))
    state = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(len(drafted), hidden, requires_grad=True)
    final, target_head = torch.randn(tokens, hidden), torch.randn(vocab, hidden)
    result = head_loss(state, weight, read_teacher(final, target_head, drafted, table), dtype=torch.float32)
    made = torch.autograd.grad(result.loss / result.inside, [state, weight])

    target = final @ target_head.T
    inside = torch.isin(target.argmax(-1), drafted)
    p = target[:, drafted].softmax(-1)
    log_q = (state @ weight.T).log_softmax(-1)
    plain = -(p * log_q).sum(-1)[inside].sum()
    wanted = torch.autograd.grad(plain / inside.sum(), [state, weight])
    assert float(result.loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-4)
    for one, other in zip(made, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)
    assert (result.inside, result.tokens) == (int(inside.sum()), tokens) and 0 < result.inside < tokens
    assert result.kl == pytest.approx(
        float(F.kl_div(log_q, p, reduction="none").sum(-1)[inside].sum().detach()), rel=1e-3
    )
    assert result.agree == int((drafted[log_q.argmax(-1)] == target.argmax(-1)).sum())
    true_p = target.softmax(-1)[:, drafted]
    assert result.overlap == pytest.approx(float(torch.minimum(true_p, log_q.exp()).sum().detach()), rel=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_each_step_is_taught_the_token_two_behind_its_pair(kind: str, model: Any):
    """Loss and acceptance of every step, from one chain at a time and the target's logits at the right position."""
    head = any_head(kind, model)
    rows = random_rows(1, 8).long()
    seen = TargetPass(model, head.feature_layers)(rows)
    settings = replace(PLAIN, token_weight=0.0)
    loss, metrics = unrolled_loss(Chains(head, rows, seen.features_BLF), rows, seen, model, settings)
    logits = model(input_ids=rows).logits[0]
    drafted = head.target_ids(torch.arange(len(DRAFTED) if kind == "eagle" else 256))
    total = 0.0
    for step in range(3):
        terms, match, places = [], 0, range(8 - 1 - step)
        for root in places:
            state = one_chain(head, rows, seen.features_BLF, root, step + 1)[-1]
            log_q, target = head.logits(state)[0, 0].log_softmax(-1), logits[root + step + 1]
            match += int(drafted[log_q.argmax()] == target.argmax())
            p = target[drafted].softmax(-1)
            if int(target.argmax()) in drafted.tolist():
                cross = -float(p @ log_q)
                terms.append(cross if kind == "eagle" else cross + float(p @ p.log()))
        total += 0.8**step * sum(terms) / len(terms)
        assert metrics[f"acceptance_{step + 1}"] == pytest.approx(match / len(places))
    assert float(loss) == pytest.approx(total, rel=1e-3)


def test_rows_too_short_for_the_steps_are_refused(model: Any):
    with pytest.raises(MoexpError, match="rows of 4 tokens for 3 draft steps"):
        train_head(small_eagle(model, DRAFTED), model, random_rows(4, 4), PLAIN)
    with pytest.raises(MoexpError, match="rows of 4 tokens for 3 draft steps"):
        train_head(new_mtp_head(model), model, random_rows(4, 4), PLAIN)
    with pytest.raises(MoexpError, match="0 draft steps"):
        HeadSettings(SHORT, steps=0)
    with pytest.raises(MoexpError, match="decay"):
        HeadSettings(SHORT, decay=0.0)


# --- training ---


def texts(rows: int = 16, length: int = 14) -> Tensor:
    """Rows that can be learnt: few tokens, in one of four orders."""
    return torch.stack([(torch.arange(length) * (1 + row % 4) + row) % 10 for row in range(rows)]).int()


TREE = TreeSettings(depth=2, width=2, groups=2, group=3, weight=0.5)
TREES = {"eagle": None, "mtp": None, "gto": TREE}


def new_head(kind: str, model: Any) -> EagleHead | MtpHead:
    return new_mtp_head(model, seed=1) if kind == "mtp" else small_eagle(model, list(range(256)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_training_lowers_the_loss_and_the_target_stays(kind: str, autocast: bool, model: Any):
    head = new_head(kind, model)
    before = [parameter.clone() for parameter in model.parameters()]
    settings = HeadSettings(Schedule(40, 1e-2, warmup=2), steps=2, rows=4, clip=1.0, autocast=autocast)
    log: list[Metrics] = []
    watch = Run(on_step=lambda step, metrics: log.append(metrics))
    assert train_head(head, model, texts(), settings, run=watch) == 40
    first, last = log[0], log[-1]
    assert last["kl"] < 0.6 * first["kl"], (first, last)
    assert last["acceptance_1"] > first["acceptance_1"] and last["acceptance_2"] > first["acceptance_2"]
    assert set(first) >= {"loss", "kl", "acceptance_1", "acceptance_2", "lr"}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())

    held = measure_head(head, model, texts(), steps=2)
    assert held["acceptance_1"] == pytest.approx(last["acceptance_1"], abs=0.2)
    assert held == measure_head(head, model, texts(), steps=2)


@pytest.mark.parametrize("kind", ["eagle", "mtp", "gto"])
def test_an_interrupted_run_resumes_bit_for_bit(kind: str, model: Any, tmp_path: Path):
    tree = TREES[kind]
    whole, first, second = (new_head(kind, model) for _ in range(3))
    log: list[Metrics] = []
    train_head(whole, model, texts(), PLAIN, tree, Run(on_step=lambda step, metrics: log.append(metrics)))

    def stop(step: int, metrics: Metrics) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        train_head(first, model, texts(), PLAIN, tree, Run(state, "this", stop))
    again: list[Metrics] = []
    watch = Run(state, "this", lambda step, metrics: again.append(metrics))
    assert train_head(second, model, texts(), PLAIN, tree, watch) == 4
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert len(again) in (1, 2)
    for key in set(log[-1]) - {"elapsed_s"}:
        assert again[-1][key] == log[-1][key], key
    with pytest.raises(MoexpError, match="written by another run"):
        train_head(new_head(kind, model), model, texts(), PLAIN, tree, Run(state, "other"))


def test_a_bf16_target_teaches_all_of_them(model: Any):
    low = copy.deepcopy(model).to(torch.bfloat16)
    settings = HeadSettings(Schedule(2, 1e-3, warmup=1), steps=2, rows=2)
    for kind, tree in TREES.items():
        log: list[Metrics] = []
        head = new_head(kind, low)
        train_head(head, low, texts(), settings, tree, Run(on_step=lambda _, metrics: log.append(metrics)))  # noqa: B023
        assert len(log) == 2 and all(torch.tensor(list(metrics.values())).isfinite().all() for metrics in log)
        assert all(parameter.dtype == torch.float32 for parameter in head.parameters())


# --- trees ---


def grow_alone(head: Any, rows: Tensor, features: Tensor, root: int, depth: int, width: int) -> dict[tuple, float]:
    """Paths that are kept at each level and their log-probabilities, every state computed from scratch."""

    def log_q(path: tuple[int, ...]) -> Tensor:
        cache = HeadCache()
        hidden = head.features(features)
        at = torch.arange(root + 1)[None]
        state = head(rows[:, 1 : root + 2], hidden[:, : root + 1], at, None, cache)[:, -1:]
        for step, token in enumerate(path):
            state = head(torch.tensor([[token]]), state, torch.tensor([[root + 1 + step]]), None, cache)
        return head.logits(state)[0, 0].log_softmax(-1)

    level: dict[tuple, float] = {(): 0.0}
    kept: dict[tuple, float] = {}
    for _ in range(depth):
        children = {}
        for path, score in level.items():
            values, ids = log_q(path).topk(width)
            for value, token in zip(values.tolist(), head.target_ids(ids).tolist(), strict=True):
                children[*path, token] = score + value
        level = dict(sorted(children.items(), key=lambda item: -item[1])[:width])
        kept |= level
    return kept


def path_of(trees: Trees, row: int, root: int, node: int) -> tuple[int, ...]:
    parent = int(trees.parents_BRN[row, root, node])
    before = path_of(trees, row, root, parent) if parent >= 0 else ()
    return (*before, int(trees.tokens_BRN[row, root, node]))


@pytest.fixture(scope="module")
def grown(model: Any) -> tuple[Any, Tensor, Any, DynamicCache, Tensor, Trees]:
    head = any_head("eagle", model)
    rows = random_rows(2, 9).long()
    cache = DynamicCache(config=model.config)
    seen = TargetPass(model, head.feature_layers)(rows, cache)
    roots = torch.tensor([0, 3, 7])
    trees = grow_trees(Chains(head, rows, seen.features_BLF).fork(roots), depth=3, width=2)
    return head, rows, seen, cache, roots, trees


def test_trees_of_many_roots_are_each_root_s_own_tree(grown: Any):
    head, rows, seen, _, roots, trees = grown
    assert trees.depths_N.tolist() == [1, 1, 2, 2, 3, 3]
    for row, number in itertools.product(range(2), range(3)):
        features = seen.features_BLF[row : row + 1]
        wanted = grow_alone(head, rows[row : row + 1], features, int(roots[number]), 3, 2)
        made = {path_of(trees, row, number, n): float(trees.scores_BRN[row, number, n]) for n in range(6)}
        assert made == {path: pytest.approx(score, abs=1e-4) for path, score in wanted.items()}
        for node in range(6):
            parent = int(trees.parents_BRN[row, number, node])
            above = trees.ancestors_BRNN[row, number, node].clone()
            assert above[node]
            above[node] = False
            inherited = trees.ancestors_BRNN[row, number, parent] if parent >= 0 else torch.zeros(6, dtype=torch.bool)
            assert torch.equal(above, inherited)


def test_one_target_pass_values_all_nodes(model: Any, grown: Any):
    _, rows, seen, cache, roots, trees = grown
    log_p, hit = read_target(model, cache, seen, roots, trees)
    for row, number, node in itertools.product(range(2), range(3), range(6)):
        path = path_of(trees, row, number, node)
        text = [*rows[row, : int(roots[number]) + 2].tolist(), *path[:-1]]
        logits = model(input_ids=torch.tensor([text])).logits[0, -1].float()
        assert float(log_p[row, number, node]) == pytest.approx(float(logits.log_softmax(-1)[path[-1]]), abs=1e-4)
        assert bool(hit[row, number, node]) == (int(logits.argmax()) == path[-1])


def small_tree() -> Trees:
    """Root -> 0 -> 2, root -> 1 -> 3 -> 4, with one row and one root; tokens 10 to 15 (5 hangs under 2)."""
    parents = [-1, -1, 0, 1, 3, 2]
    above = torch.zeros(6, 6, dtype=torch.bool)
    for node in range(6):
        at = node
        while at >= 0:
            above[node, at] = True
            at = parents[at]
    return Trees(
        torch.arange(10, 16).view(1, 1, 6),
        torch.tensor(parents).view(1, 1, 6),
        above.view(1, 1, 6, 6),
        torch.zeros(1, 1, 6),
        torch.tensor([1, 1, 2, 2, 3, 3]),
    )


def test_the_reward_is_equation_5_and_the_expectation_a_sum_over_nodes():
    p = torch.tensor([0.5, 0.3, 0.4, 0.9, 0.2, 0.7]).view(1, 1, 6)
    reward, expected = tree_rewards(small_tree(), p.log(), eta=2.0)
    left, right = (
        0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.7,
        0.3 + 0.3 * 0.9 + 0.3 * 0.9 * 0.2,
    )  # ends: 5, 4
    wanted = torch.logsumexp(2 * torch.tensor([left, right]), 0) / 2
    assert float(reward) == pytest.approx(float(wanted), rel=1e-5)
    assert float(expected) == pytest.approx(left + right, rel=1e-5)


def test_the_accepted_path_stops_at_the_first_wrong_token():
    def path(hit: list[bool]) -> tuple[list[int], int]:
        tokens, length = accepted_paths(small_tree(), torch.tensor(hit).view(1, 1, 6))
        return tokens[0, 0].tolist(), int(length)

    assert path([False, True, True, True, True, False]) == ([11, 13, 14], 3)
    assert path([False, True, False, False, True, False]) == ([11, 0, 0], 1)
    assert path([False, True, False, True, False, True]) == ([11, 13, 0], 2)
    assert path([False, False, True, True, True, True]) == ([0, 0, 0], 0)


# --- GTO ---


def test_groups_are_runs_of_adjacent_positions_that_do_not_overlap():
    tree = TreeSettings(groups=3, group=4)
    seen = set()
    for step in range(20):
        roots = group_roots(15, tree, 0, step)
        assert torch.equal(roots, group_roots(15, tree, 0, step))
        assert len(set(roots.tolist())) == 12 and int(roots.min()) >= 0 and int(roots.max()) < 15
        assert (roots.view(3, 4).diff(dim=1) == 1).all()
        seen |= set(roots.tolist())
    assert len(seen) == 15
    with pytest.raises(MoexpError, match="3 groups of 4 positions in rows of 12 tokens"):
        group_roots(11, tree, 0, 0)
    with pytest.raises(MoexpError, match="no standard deviation"):
        TreeSettings(group=1)


def test_advantages_are_standardised_within_their_group():
    reward = torch.tensor([[1.0, 3.0, 10.0, 10.0]])
    made = group_advantages(reward, 2, 1e-3)
    assert made[0].tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.0], abs=2e-3)
    noise = group_advantages(reward.new_tensor([[0.0, 1e-7]]), 2, 1e-3)
    assert noise.abs().max() < 1e-3


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted"),
    [(1.5, 1.0, -1.2), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8), (1.1, 2.0, -2.2)],
)
def test_the_surrogate_is_clipped_where_it_would_gain(ratio: float, advantage: float, wanted: float):
    value = torch.tensor([ratio], requires_grad=True)
    loss = clipped_surrogate(value, torch.tensor([advantage]), 0.2)
    assert float(loss.detach()) == pytest.approx(wanted)
    (slope,) = torch.autograd.grad(loss, value)
    clipped = (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    assert float(slope) == pytest.approx(0.0 if clipped else -advantage)


def test_path_likelihoods_are_products_of_the_steps(model: Any, grown: Any):
    head, rows, seen, _, roots, trees = grown
    tokens = torch.stack([trees.tokens_BRN[:, :, n] for n in (0, 2, 4)], dim=-1)
    lengths = torch.tensor([[3, 0, 1], [2, 3, 3]])
    chains = Chains(head, rows, seen.features_BLF)
    made = path_log_likelihood(chains.fork(roots), tokens, lengths)
    for row, number in itertools.product(range(2), range(3)):
        features, total, cache = seen.features_BLF[row : row + 1], 0.0, HeadCache()
        root = int(roots[number])
        known, hidden = rows[row : row + 1, 1 : root + 2], head.features(features[:, : root + 1])
        state = head(known, hidden, torch.arange(root + 1)[None], None, cache)[:, -1:]
        for step in range(int(lengths[row, number])):
            token = tokens[row, number, step].view(1, 1)
            total += float(head.logits(state)[0, 0].log_softmax(-1)[head.draft_ids(token)[0, 0]])
            state = head(token, state, torch.tensor([[root + 1 + step]]), None, cache)
        assert float(made[row, number]) == pytest.approx(total, abs=1e-4)


@pytest.fixture(scope="module")
def taught(model: Any) -> EagleHead:
    """A head that drafts `texts` with some success."""
    head = small_eagle(model, list(range(256)))
    settings = HeadSettings(Schedule(30, 1e-2, warmup=2), steps=2, rows=4, clip=1.0, autocast=False)
    train_head(head, model, texts(), settings)
    return head


def test_the_tree_loss_is_still_at_the_start_and_its_gradient_leads_down(model: Any, taught: EagleHead):
    """Against itself a head has no advantage; against another start it has, and a small step lowers the loss."""
    head, rows = frozen_copy(taught).requires_grad_(True), texts(4).long()
    tree = TreeSettings(depth=2, width=2, groups=2, group=4)
    roots = group_roots(13, tree, 0, 0)

    def losses(reference: EagleHead) -> tuple[Tensor, Metrics]:
        cache = DynamicCache(config=model.config)
        seen = TargetPass(model, head.feature_layers)(rows, cache)
        chains = Chains(head, rows, seen.features_BLF)
        return tree_loss(chains, reference, rows, seen, model, cache, roots, tree)

    loss, metrics = losses(frozen_copy(head))
    assert abs(float(loss.detach())) < 1e-2 and metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["reward"] == pytest.approx(metrics["reward_reference"], abs=1e-5)
    assert metrics["path"] > 0 and metrics["clipped"] == 0.0

    other = frozen_copy(head)
    generator = torch.Generator().manual_seed(0)
    for parameter in other.trainable().values():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
    loss, metrics = losses(other)
    assert metrics["reward"] != metrics["reward_reference"]
    loss.backward()
    slopes = {name: p.grad for name, p in head.trainable().items() if p.grad is not None}
    slope = math.sqrt(sum(float(grad.square().sum()) for grad in slopes.values()))
    assert slope > 0
    for name, grad in slopes.items():
        head.trainable()[name].data -= 1e-4 / slope * grad
    after, _ = losses(other)
    drop = float((loss - after).detach())
    assert drop == pytest.approx(1e-4 * slope, rel=0.2)


def test_gto_trains_from_an_eagle_head_and_logs_the_tree(model: Any, taught: EagleHead):
    head = frozen_copy(taught)
    log: list[Metrics] = []
    tree = TreeSettings(depth=3, width=2, groups=2, group=4)
    slow = HeadSettings(Schedule(8, 1e-3, warmup=1), steps=2, rows=4, autocast=False)
    train_head(head, model, texts(), slow, tree, Run(on_step=lambda step, metrics: log.append(metrics)))
    assert log[0]["reward"] == pytest.approx(log[0]["reward_reference"], abs=1e-4)
    assert log[-1]["reward"] != log[-1]["reward_reference"] and log[-1]["expected"] > 0
    assert any(not torch.equal(value, taught.state_dict()[name]) for name, value in head.state_dict().items())
    assert {"acceptance_1", "overlap_2", "path", "ratio", "clipped", "expected_reference"} <= set(log[0])


# --- the start ---


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_head_starts_with_the_best_linear_guess_of_the_next_state(kind: str, model: Any):
    head, rows = any_head(kind, model), random_rows(12, 40)
    if isinstance(head, EagleHead):
        start_eagle(head, model.model.norm, model.lm_head)
    else:
        start_mtp(head, model.model.norm)
    before = measure_head(head, model, rows, steps=1)
    loss = start_by_least_squares(head, model, rows, batch=5)
    after = measure_head(head, model, rows, steps=1)
    assert after["kl"] < before["kl"] and math.isfinite(loss)

    # The solver of torch on the same pairs, without the ridge, can do no better than a little.
    seen, embedded = TargetPass(model, head.feature_layers)(rows), head.shared.embed(rows[:, 5:]).float()
    states = seen.features_BLF[:, 4:-1].float()
    if isinstance(head, MtpHead):
        inputs = torch.cat([head.enorm(embedded), head.hnorm(states)], dim=-1).flatten(0, 1)
        made = inputs @ head.eh_proj.weight.T
    else:
        inputs = torch.cat([states, head.midlayer.input_layernorm(embedded)], dim=-1).flatten(0, 1)
        chains = Chains(head, rows, seen.features_BLF)
        made = chains.hidden[:, 4:].flatten(0, 1)
    wanted = (seen.final_BLH[:, 5:].float() / model.model.norm.weight.float()).flatten(0, 1)
    best = inputs @ torch.linalg.lstsq(inputs, wanted, driver="gelsd").solution
    errors = [float((guess - wanted).square().mean()) for guess in (best, made, torch.zeros_like(wanted))]
    assert errors[0] <= errors[1] < errors[0] + 0.5 * (errors[2] - errors[0])
