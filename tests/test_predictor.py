"""The expert predictor: what a tree, a chain and a text give, what it learns, and what it is compared with."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, Qwen3Config
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.cli import main as cli
from moexp.config import locations
from moexp.config.recipe import load_recipe
from moexp.data.traces import RoutingGeometry, TraceManifest, TraceShard, read_trace, write_shard
from moexp.learn.core.loop import Run, Schedule
from moexp.learn.predictor import train as training
from moexp.learn.predictor.data import RoutingRows, batch_of, read_rows, rows_of, split_rows
from moexp.learn.predictor.lesson import (
    CONTEXT_FREE,
    LEVELS,
    NEAR,
    PREVIOUS_TOKEN,
    Lesson,
    Levels,
    baseline_hits,
    evaluate,
)
from moexp.learn.predictor.loss import overlap_hits, routing_logits, routing_loss
from moexp.learn.predictor.train import PREDICTOR, RIDGE, SCALES, fit, fit_head
from moexp.runtime.drafters.draft_tree import DraftTree, blocks_of
from moexp.runtime.engine.engine import AR, Block
from moexp.runtime.opening import open_predictor
from moexp.runtime.predictors.backbone import fit_projection, open_backbone, pretrained_backbone, small_backbone
from moexp.runtime.predictors.files import WEIGHTS, load_predictor, read_header, target_embedding, write_predictor
from moexp.runtime.predictors.learned import CHUNK, LearnedPredictor, RoutingPredictor, top_experts
from moexp.runtime.predictors.oracle import OraclePredictor, Recording
from moexp.target.load import load_target
from moexp.target.opening import open_target
from tests.engines import make_engine, prompt
from tests.tiny_models import dense_folder, tiny_folder, whole_model
from tests.trees import build

pytestmark = pytest.mark.e2e

VOCAB, WIDTH = 50, 12

GEOMETRY = RoutingGeometry(layers=(1, 2, 4), num_experts=8, top_k=2)
TREE = build([-1, 0, 0, 1, 1, 2, 3, 3], [0.0, *[-0.5] * 7], [3, 7, 8, 9, 4, 9, 1, 2])
TEXT = [11, 5, 30, 2, 48, 17, 9]


def embedding(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(seed)) * 0.1


def model_of(*, context: int = 64, layers: int = 2, geometry: RoutingGeometry = GEOMETRY) -> RoutingPredictor:
    torch.manual_seed(1)
    model = RoutingPredictor(small_backbone(16, layers, 2, context), embedding(), geometry, context=context)
    torch.nn.init.normal_(model.head.weight)  # as far apart as a trained head puts them
    return model.eval()


def logits_of(model: RoutingPredictor, tokens: list[int]) -> torch.Tensor:
    """Logits [T, L, E] of a whole text, run once without a cache."""
    with torch.no_grad():
        return model.logits(model.hidden(torch.tensor([tokens]))[0])


def predictor_after(model: RoutingPredictor, tokens: list[int], run: int = 0) -> LearnedPredictor:
    """A predictor that follows a text whose next token is pending; of the text `run` tokens were a prompt."""
    predictor = LearnedPredictor(model)
    predictor.begin([*tokens[:run], *(tokens[run : run + 1] or [3])], 8)
    if run < len(tokens):
        predictor.commit([*tokens[run + 1 :], 3])
    return predictor


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-4, rtol=1e-4)


# --- trees, chains, texts ---


def test_a_token_sees_what_is_before_it_and_nothing_behind():
    model, text = model_of(), prompt(12, vocab=VOCAB)
    whole = logits_of(model, text)
    for length in (1, 5, 11):
        assert close(logits_of(model, text[:length]), whole[:length])
        changed = [*text[:length], *((token + 1) % VOCAB for token in text[length:])]
        assert close(logits_of(model, changed)[:length], whole[:length])
        assert not close(logits_of(model, changed)[length:], whole[length:])
    assert whole.shape == (12, 3, 8) and whole.dtype == torch.float32


@pytest.mark.parametrize("flushed", [0, 4, 7], ids=lambda count: f"{count} of the text run before")
def test_each_node_of_a_tree_has_the_logits_of_its_path_as_a_chain(flushed: int):
    model = model_of()
    predictor = predictor_after(model, TEXT, flushed)
    logits_NLE = predictor.tree_logits(TREE)
    for node in range(len(TREE)):
        path = TREE.tokens_N[TREE.path(node)].tolist()
        assert close(logits_NLE[node], logits_of(model, [*TEXT, *path])[-1])
    predicted = predictor.predict(TREE)
    assert predicted.shape == (8, 3, 2) and predicted.dtype == np.int16
    assert np.array_equal(predicted, np.argsort(-logits_NLE.numpy(), axis=-1, kind="stable")[..., :2])


def test_a_tree_leaves_the_text_as_it_was_and_a_path_can_be_continued():
    model = model_of()
    predictor = predictor_after(model, TEXT)
    before = predictor.tree_logits(TREE)
    assert close(predictor.tree_logits(TREE), before)
    predictor.commit([7, 4])
    after = predictor.tree_logits(DraftTree.chain(4, [5], [-1.0]))
    assert close(after, logits_of(model, [*TEXT, 3, 7, 4, 5])[-2:])


def test_attention_reaches_back_as_far_as_was_trained_and_no_further():
    """One layer: beyond its reach the text makes no difference, and only distances count."""
    model, text = model_of(context=6, layers=1), prompt(CHUNK + 40, vocab=VOCAB)
    chain = DraftTree.chain(3, [7], [-1.0])
    far = predictor_after(model, text).tree_logits(chain)
    assert close(far[0], logits_of(model, [*text[-5:], 3])[-1])
    assert close(far[1], logits_of(model, [*text[-4:], 3, 7])[-1])
    assert not close(far[0], logits_of(model, [*text[-4:], 3])[-1])


def test_top_experts_are_the_likeliest_by_layer():
    logits_TLE = torch.tensor([[[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 4.0, 0.0]]])
    assert top_experts(logits_TLE, 2).tolist() == [[[1, 3], [0, 2]]]


# --- equations ---


def test_the_loss_is_cross_entropy_against_an_equal_share_for_each_routed_expert():
    """By hand: two experts of logits ln 3 and 0 have p = 3/4, 1/4; with K = 2 of E = 4 equal ones, -log p = log 4."""
    one = torch.tensor([[[math.log(3.0), 0.0]]])
    assert float(routing_loss(one, torch.tensor([[[0]]]))) == pytest.approx(-math.log(0.75))
    assert float(routing_loss(one, torch.tensor([[[1]]]))) == pytest.approx(-math.log(0.25))
    assert float(routing_loss(one, torch.tensor([[[0, 1]]]))) == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    flat = torch.zeros(3, 5, 4)  # summed over tokens and layers
    assert float(routing_loss(flat, torch.zeros(3, 5, 2, dtype=torch.int64))) == pytest.approx(15 * math.log(4))


def test_the_loss_and_its_gradient_are_those_of_the_equations_written_out():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 3, 8, generator=generator, requires_grad=True)
    experts = torch.rand(7, 3, 8, generator=generator).topk(2, dim=-1).indices
    p = logits.softmax(-1)
    q = torch.zeros_like(p).scatter(-1, experts, 1 / 2)  # equation 5
    written_out = -(q * p.log()).sum()  # equation 6
    (expected,) = torch.autograd.grad(written_out, logits)
    loss = routing_loss(logits, experts)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(loss, written_out, rtol=1e-5)
    assert torch.allclose(found, expected, atol=1e-6) and torch.allclose(found, p.detach() - q, atol=1e-6)


# --- data, metric, baselines ---


def shard_of(lengths: list[int], seed: int = 0, vocab: int = 12, first: int = 0) -> TraceShard:
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    experts = np.argsort(rng.random((total, len(GEOMETRY.layers), GEOMETRY.num_experts)), axis=-1)
    return TraceShard(
        sample_T=np.repeat(np.arange(first, first + len(lengths)), lengths),
        position_T=np.concatenate([np.arange(length) for length in lengths]),
        token_T=rng.integers(0, vocab, total).astype(np.int32),
        experts_TLk=experts[..., : GEOMETRY.top_k].astype(np.uint8),
    )


def test_texts_are_cut_into_rows_and_no_token_is_lost():
    shards = [shard_of([5, 1, 9]), shard_of([4], seed=1, first=3)]
    rows = rows_of(shards, GEOMETRY, context=4)
    assert (rows.end_R - rows.begin_R).tolist() == [4, 1, 1, 4, 4, 1, 4]
    assert rows.sample_R.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert rows.tokens_of(range(len(rows))).tolist() == list(range(19))
    assert np.flatnonzero(rows.first_T).tolist() == [0, 5, 6, 15]
    part = batch_of(rows, [1, 3])
    assert part.live_BT.tolist() == [[True, False, False, False], [True] * 4]
    assert part.ids_BT[1].tolist() == shards[0].token_T[6:10].tolist()
    assert part.experts_PLk.tolist() == shards[0].experts_TLk[[4, 6, 7, 8, 9]].tolist()


def test_samples_are_split_whole_and_the_same_way_each_time():
    rows = rows_of([shard_of([6, 3, 8, 5, 2, 7, 4, 4, 9, 1])], GEOMETRY, context=4)
    train, held = split_rows(rows, 0.2, seed=3)
    samples = [set(rows.sample_R[part].tolist()) for part in (train, held)]
    assert not samples[0] & samples[1] and len(samples[1]) == 2 and len(train) + len(held) == len(rows)
    assert all(np.array_equal(a, b) for a, b in zip(split_rows(rows, 0.2, seed=3), (train, held), strict=True))
    assert any(not np.array_equal(split_rows(rows, 0.2, seed)[1], held) for seed in range(3))
    with pytest.raises(MoexpError, match="one sample"):
        split_rows(rows_of([shard_of([6])], GEOMETRY, context=4), 0.2, seed=0)


def test_the_metric_is_the_mean_share_of_routed_experts_that_were_predicted():
    model = model_of()
    rows = rows_of([shard_of([9, 4, 6])], GEOMETRY, context=5)
    chosen = np.array([0, 2, 3])
    task = Lesson(rows, chosen, chosen, Schedule(1, 1.0), 2, torch.float32, backbone_rate=1.0, seed=0)
    hits_L = evaluate(model, task, chosen)
    shares = []
    for row in chosen:
        tokens = rows.token_T[rows.begin_R[row] : rows.end_R[row]].tolist()
        for token, logits_LE in enumerate(logits_of(model, tokens).numpy()):
            for layer in range(3):
                routed = set(rows.experts_TLk[rows.begin_R[row] + token, layer].tolist())
                best = sorted(range(8), key=lambda expert: -logits_LE[layer, expert])[:2]
                shares.append(len(routed & set(best)) / 2)
    assert task.overlap(hits_L, chosen) == pytest.approx(np.mean(shares))
    predicted, routed_ = torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[[2, 1], [4, 5]]])
    assert overlap_hits(predicted, routed_).tolist() == [2, 1]


def test_baselines_against_counting_one_by_one():
    lengths = [7, 5, 9, 3, 6, 4, 8, 5]
    rows = rows_of([shard_of(lengths, vocab=22)], GEOMETRY, context=4)
    train_R, held_R = split_rows(rows, 0.4, seed=0)
    train_T, held_T = rows.tokens_of(train_R).tolist(), rows.tokens_of(held_R).tolist()
    assert set(rows.token_T[held_T].tolist()) - set(rows.token_T[train_T].tolist()), "no unknown token: a weaker test"
    expected = {name: [0, 0, 0] for name in (CONTEXT_FREE, PREVIOUS_TOKEN)}
    for layer in range(3):
        load: Counter[int] = Counter()
        of_token: dict[int, Counter[int]] = {}
        for at in train_T:
            load.update(rows.experts_TLk[at, layer].tolist())
            of_token.setdefault(int(rows.token_T[at]), Counter()).update(rows.experts_TLk[at, layer].tolist())
        usual = sorted(range(8), key=lambda expert: (-load[expert], expert))[:2]
        for at in held_T:
            routed = set(rows.experts_TLk[at, layer].tolist())
            seen = of_token.get(int(rows.token_T[at]), Counter())
            best = sorted(range(8), key=lambda e: (-seen[e], -load[e], e))[:2]
            before = usual if rows.first_T[at] else rows.experts_TLk[at - 1, layer].tolist()
            expected[CONTEXT_FREE][layer] += len(routed & set(best))
            expected[PREVIOUS_TOKEN][layer] += len(routed & set(before))
    found = baseline_hits(rows, train_R, held_R)
    assert {name: hits.tolist() for name, hits in found.items()} == expected


# --- training ---


def planted_rows(samples: int = 60, length: int = 16) -> RoutingRows:
    """Routing by a rule that needs the token and the one before it: neither baseline can know it."""
    rng = np.random.default_rng(0)
    token_T = rng.integers(0, 10, samples * length)
    before_T = np.where(np.arange(len(token_T)) % length, np.roll(token_T, 1), 0)
    one_T, two_T = token_T % 4, 4 + before_T % 4  # of eight experts, one by each
    experts_TLk = np.stack([np.stack([one_T, two_T], -1), np.stack([4 + one_T, two_T - 4], -1)], 1)
    shard = TraceShard(
        sample_T=np.repeat(np.arange(samples), length),
        position_T=np.tile(np.arange(length), samples),
        token_T=token_T.astype(np.int32),
        experts_TLk=experts_TLk.astype(np.uint8),
    )
    return rows_of([shard], RoutingGeometry((0, 1), 8, 2), context=length)


def lesson(rows: RoutingRows, steps: int, **changes: Any) -> Lesson:
    train_R, held_R = split_rows(rows, 0.2, seed=0)
    settings = {"batch": 8, "dtype": torch.float32, "backbone_rate": 1.0, "seed": 0, **changes}
    return Lesson(rows, train_R, held_R, Schedule(steps, 5e-3, warmup=5), **settings)


def fresh(rows: RoutingRows, dropout: float = 0.0) -> RoutingPredictor:
    torch.manual_seed(0)
    return RoutingPredictor(small_backbone(32, 1, 2, 16), embedding(), rows.geometry, context=16, dropout=dropout)


def test_training_finds_a_planted_rule_that_neither_baseline_can_and_keeps_checkpoints_on_the_way(tmp_path: Path):
    rows = planted_rows()
    task, model, log = lesson(rows, 240), fresh(rows), list[dict[str, Any]]()
    keeper = Levels(tmp_path / "levels", "t" * 64)
    assert fit(model, task, levels=keeper, log=log) == 240
    reached = task.overlap(evaluate(model, task, task.held_R), task.held_R)
    baselines = baseline_hits(rows, task.train_R, task.held_R)
    others = {name: task.overlap(hits, task.held_R) for name, hits in baselines.items()}
    assert reached > 0.95 and all(value < 0.75 for value in others.values()), (reached, others)
    assert log[0]["overlap"] < 0.75 and log[-1]["overlap"] > 0.95 and log[-1]["step"] == 240
    for name in keeper.saved():
        kept = load_predictor(tmp_path / "levels" / name, "t" * 64, embedding())
        probe = read_header(tmp_path / "levels" / name)["probe"]
        assert abs(probe - LEVELS[name]) <= NEAR
        assert task.probe(kept) == pytest.approx(probe, abs=0.02)  # saved in bf16
    assert keeper.saved()


def test_the_head_starts_from_ridge_regression_scaled_to_the_least_loss():
    rows = planted_rows()
    model, task = fresh(rows), lesson(rows, 1)
    assert fit_head(model, task, tokens=10**9) == (len(task.train_R) - task.batch) * 16
    order_R = np.random.default_rng(task.seed).permutation(task.train_R)
    inputs, outputs = [], []
    for row in order_R[: -task.batch]:
        tokens = rows.tokens_of(np.array([row]))
        with torch.no_grad():
            inputs.append(model.hidden(torch.from_numpy(rows.token_T[tokens]).long()[None])[0].double().numpy())
        hot_TO = np.zeros((len(tokens), 2 * 8))
        for layer in range(2):
            for token, routed in enumerate(rows.experts_TLk[tokens, layer]):
                hot_TO[token, layer * 8 + routed] = 1.0
        outputs.append(hot_TO)
    x_PH, y_PO = np.concatenate(inputs), np.concatenate(outputs)
    x_PH = np.concatenate([x_PH, np.ones((len(x_PH), 1))], axis=1)
    gram_HH = x_PH.T @ x_PH
    gram_HH += RIDGE * np.trace(gram_HH) / len(gram_HH) * np.eye(len(gram_HH))
    solved_HO = np.linalg.solve(gram_HH, x_PH.T @ y_PO)
    last = batch_of(rows, order_R[-task.batch :])

    def loss(scale: float) -> float:
        model.head.weight.data = torch.from_numpy(scale * solved_HO[:-1].T).float()
        model.head.bias.data = torch.from_numpy(scale * solved_HO[-1]).float()
        with torch.no_grad():
            return float(routing_loss(routing_logits(model, last, torch.float32), last.experts_PLk))

    reached = model.head.weight.detach().clone()
    best = min(SCALES, key=loss)
    assert torch.allclose(reached, torch.from_numpy(best * solved_HO[:-1].T).float(), atol=2e-2)


def test_a_started_head_knows_what_the_token_says_and_weaker_ones_were_offered(tmp_path: Path, monkeypatch):
    rows = planted_rows()
    model, task = fresh(rows), lesson(rows, 1)
    keeper, offered = Levels(tmp_path, "t" * 64), []
    monkeypatch.setattr(keeper, "offer", lambda model, reached, step: offered.append(reached))
    fit_head(model, task, 10**9, keeper)
    assert len(offered) == 9  # after 1, 2, 3, 4, 6, 9, 13, 19 and all 40 of the rows
    assert offered[-1] > max(offered[0], 0.6)
    few = fresh(rows)
    assert fit_head(few, task, tokens=40) == 48  # 3 rows of 16
    assert not torch.equal(few.head.weight, model.head.weight)


def test_the_checkpoint_kept_is_the_nearest_and_none_is_kept_far_off(tmp_path: Path):
    keeper, model = Levels(tmp_path, "t" * 64), model_of()
    offers = [0.3, 0.44, 0.46, 0.462, 0.51, 0.53, 0.7]
    for step, reached in enumerate(offers):
        keeper.offer(model, reached, step)
    assert list(keeper.saved()) == ["near-50"]
    assert read_header(tmp_path / "near-50")["probe"] == 0.51 and read_header(tmp_path / "near-50")["steps"] == 4


def test_stopped_training_resumes_to_the_very_same_weights(tmp_path: Path, monkeypatch):
    rows = planted_rows(samples=20)
    whole, stopped, resumed = (fresh(rows, dropout=0.2) for _ in range(3))
    task = lesson(rows, 12)
    fit(whole, task)
    plain = training.own_rows

    def interrupt(rows: torch.Tensor, size: int, step: int, seed: int) -> torch.Tensor:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(rows, size, step, seed)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "own_rows", interrupt)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
        fit(stopped, task, run=Run(tmp_path / "state", "mine"))
    assert fit(resumed, task, run=Run(tmp_path / "state", "mine")) == 12
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(stopped.head.weight, whole.head.weight)
    with pytest.raises(MoexpError, match="another run"):
        fit(fresh(rows), task, run=Run(tmp_path / "state", "other"))


def test_bf16_products_train_fp32_weights_and_the_embedding_and_a_still_backbone_stay():
    rows = planted_rows(samples=20)
    model = fresh(rows)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = model.embedding_VD.clone()
    fit(model, lesson(rows, 4, dtype=torch.bfloat16, backbone_rate=0.0))
    after = model.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in after.values()) and torch.equal(model.embedding_VD, kept)
    assert all(torch.equal(after[name], before[name]) == name.startswith("backbone.") for name in after)
    part = batch_of(rows, [0])
    logits = [routing_logits(model.eval(), part, kind) for kind in (torch.bfloat16, torch.float32)]
    assert logits[0].dtype == torch.float32 and not torch.equal(*logits)
    assert torch.allclose(logits[0], logits[1], atol=0.05)


# --- backbones ---


def test_a_pretrained_backbone_that_has_the_targets_embedding_starts_as_the_model_it_is(tmp_path: Path):
    """The first layers of a checkpoint, behind its own embedding: hidden states as the checkpoint has them."""
    folder, dense = dense_folder(tmp_path / "dense"), whole_model(tmp_path / "dense")
    own = dense.get_input_embeddings().weight.detach()
    model = RoutingPredictor(pretrained_backbone(folder, layers=2), own, GEOMETRY).eval()
    ids = torch.tensor([prompt(9)])
    base: Any = dense.model
    with torch.no_grad():
        expected = dense(input_ids=ids, output_hidden_states=True).hidden_states[2]
        assert torch.allclose(model.hidden(ids), base.norm(expected), atol=1e-3)
        other = RoutingPredictor(pretrained_backbone(folder, layers=2), torch.randn(256, 24), GEOMETRY).eval()
        assert not torch.allclose(other.hidden(ids), base.norm(expected), atol=1e-1)
    assert "backbone.embed_tokens.weight" not in model.trainable() and "backbone.layers.1.mlp.up_proj.weight" in dict(
        model.trainable()
    )
    with pytest.raises(MoexpError, match="9 layers of a backbone of 3"):
        pretrained_backbone(folder, layers=9)
    with pytest.raises(MoexpError, match="not a backbone"):
        pretrained_backbone(tmp_path)


def test_a_backbone_with_sliding_windows_is_refused_and_a_full_one_is_cut(tmp_path: Path):
    common: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    common |= {"head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None}
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    AutoModel.from_config(Qwen3Config(**common)).save_pretrained(tmp_path / "full")
    AutoModel.from_config(Qwen3Config(**common, **windows)).save_pretrained(tmp_path / "sliding")
    cut: Any = pretrained_backbone(tmp_path / "full", 1).model
    assert len(cut.layers) == 1 and cut.config.num_hidden_layers == 1
    with pytest.raises(MoexpError, match="attention is not full"):
        pretrained_backbone(tmp_path / "sliding")


def test_a_projection_between_embeddings_is_fitted_where_tokens_mean_the_same():
    one, turn = torch.randn(80, 6), torch.randn(6, 9)
    found = fit_projection(one, one @ turn)
    assert found is not None and torch.allclose(found, turn.T, atol=1e-3)
    assert fit_projection(one, torch.randn(80, 9)) is None


def test_a_random_target_has_no_dense_source():
    with pytest.raises(MoexpError, match="not carved"):
        open_backbone(load_recipe("tiny", ["predictor.backbone=source"]), Path("unused"))
    with pytest.raises(MoexpError, match="predictor.backbone"):
        open_backbone(load_recipe("tiny", ["predictor.backbone=no/such-model"]), Path("unused"))


# --- files ---


def test_a_saved_predictor_says_the_same_and_names_what_it_belongs_to(tmp_path: Path):
    model = model_of(context=7)
    write_predictor(tmp_path / "p", model, "a" * 64, {"metrics": {}}, dtype=torch.float32)
    loaded = load_predictor(tmp_path / "p", "a" * 64, embedding())
    assert torch.equal(logits_of(loaded, TEXT), logits_of(model, TEXT)) and loaded.context == 7
    header = read_header(tmp_path / "p")
    assert (
        header["target"] == "a" * 64 and header["layers"] == [1, 2, 4] and header["backbone"]["model_type"] == "qwen3"
    )
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == ["predictor.json", "predictor.safetensors"]
    half = load_predictor(tmp_path / "p", "a" * 64, embedding(), dtype=torch.bfloat16)
    assert half.head.weight.dtype == torch.bfloat16 and half.backbone.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.allclose(logits_of(half, TEXT), logits_of(model, TEXT), atol=0.3)


def test_a_foreign_missing_or_damaged_predictor_is_one_clear_error(tmp_path: Path):
    write_predictor(tmp_path, model_of(), "a" * 64, {})
    with pytest.raises(MoexpError, match=f"a predictor of target {'a' * 12}, but the target is {'b' * 12}"):
        load_predictor(tmp_path, "b" * 64, embedding())
    with pytest.raises(MoexpError, match="no expert predictor"):
        load_predictor(tmp_path / "none", "a" * 64, embedding())
    with pytest.raises(MoexpError, match="damaged predictor"):
        load_predictor(tmp_path, "a" * 64, embedding()[:, :5])
    weights = tmp_path / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(MoexpError, match="damaged predictor"):
        load_predictor(tmp_path, "a" * 64, embedding())
    (tmp_path / "predictor.json").write_text('{"format": "else"}')
    with pytest.raises(MoexpError, match="unknown format 'else'"):
        load_predictor(tmp_path, "a" * 64, embedding())


def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path):
    manifest = TraceManifest("c" * 64, "x", GEOMETRY, False, "t", "i", complete=True)
    manifest.shards.append(write_shard(tmp_path, 0, shard_of([6, 5]), manifest))
    manifest.save(tmp_path)
    assert len(read_rows(read_trace(tmp_path, "c" * 64), 4, vocab=12)) == 4
    with pytest.raises(MoexpError, match="a token outside a vocabulary of 3"):
        read_rows(read_trace(tmp_path), 4, vocab=3)
    with pytest.raises(MoexpError, match=f"a trace of target {'c' * 12}"):
        read_trace(tmp_path, "d" * 64)
    shard = tmp_path / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(MoexpError, match="has .* bytes where the manifest says"):
        read_trace(tmp_path, "c" * 64)


# --- in decoding ---


def test_the_learned_predictor_follows_a_request_from_cycle_to_cycle():
    model = model_of()
    predictor = LearnedPredictor(model)
    for text in (TEXT, TEXT[2:], [4]):  # one request after another
        tree = build([-1, 0, 0], [0.0, -1.0, -1.0], [text[-1], 7, 8])
        predictor.begin(text, 8)
        predicted = predictor.predict(tree)
        assert np.array_equal(predicted[2], top_experts(logits_of(model, [*text, 8])[-1:], 2)[0].numpy())
        predictor.commit([7, 12])
        follows = predictor.predict(DraftTree.chain(12, [1], [-1.0]))
        assert np.array_equal(follows, top_experts(logits_of(model, [*text, 7, 12, 1])[-2:], 2).numpy())
        with pytest.raises(AssertionError, match="not the pending token"):
            predictor.predict(DraftTree.chain(13, [], []))


@pytest.mark.parametrize("rows", [4, 5, 8, 20])
def test_blocks_cover_a_tree_with_all_ancestors(rows: int):
    blocks = blocks_of(TREE, rows)
    assert set().union(*blocks) == set(range(len(TREE))) and all(len(block) <= rows for block in blocks)
    assert all(TREE.is_prefix_closed(block) for block in blocks)
    with pytest.raises(MoexpError, match="a path of 4 nodes in steps of 3 rows"):
        blocks_of(TREE, 3)


def test_the_oracle_is_the_targets_routing_of_each_path_and_is_replayed_without_a_target(tiny_folder):
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5]  # more nodes than one block of eight rows has
    tokens = prompt(len(parents), seed=5)
    ids = prompt(9)
    tree = build(parents, [0.0, *[-1.0] * 9], [ids[-1], *tokens[1:]])
    engine, by_hand = make_engine(tiny_folder()), make_engine(tiny_folder())
    recording: Recording = {}

    def decode(oracle: OraclePredictor) -> list[np.ndarray]:
        oracle.begin(ids, 16)
        first = oracle.predict(tree)
        emitted = [*tree.tokens_N[[1, 3]].tolist(), 77]
        oracle.commit(emitted)
        second = oracle.predict(DraftTree.chain(77, [5, 6], [-1.0, -1.0]))
        return [first, second]

    first, second = decode(OraclePredictor(recording, engine))
    for text, chosen in [
        *(([*ids[:-1], *tree.tokens_N[tree.path(node)].tolist()], first[node]) for node in range(len(tree))),
        ([*ids, *tree.tokens_N[[1, 3]].tolist(), 77, 5, 6], second[2]),
    ]:
        by_hand.start(32)
        by_hand.prefill(ids[:-1])
        for token in text[len(ids) - 1 :]:
            out = by_hand.run(Block([token]), AR)
        assert np.array_equal(out.routing_LBk[:, 0], chosen)
    assert len(recording) == 2
    replayed = decode(OraclePredictor(recording))
    assert all(np.array_equal(a, b) for a, b in zip(replayed, (first, second), strict=True))
    stranger = OraclePredictor(recording)
    stranger.begin(ids[1:], 16)
    with pytest.raises(MoexpError, match="no routing is recorded for this tree"):
        stranger.predict(tree)


# --- the command ---


def moexp_(*arguments: str) -> Any:
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, [*arguments, "--recipe", "tiny"], env=environment)


def test_train_predictor_from_the_command_line(tmp_path: Path, moexp_home: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("tiny")
    assert "run: moexp build-target --recipe tiny" in moexp_("train-predictor").stderr
    assert moexp_("build-target").exit_code == 0
    result = moexp_("train-predictor")
    assert result.exit_code == 0, result.output + repr(result.exception)
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines[:5])
    table = {line.split("  ")[0]: line.split() for line in lines}
    header = read_header(locations.predictor_folder(recipe))
    overlaps = header["metrics"]["overlap"]
    for name in (PREDICTOR, CONTEXT_FREE, PREVIOUS_TOKEN):
        assert float(table[name][1]) == pytest.approx(overlaps[name], abs=5e-4)
    assert header["training"]["steps"] > 0 and header["recipe"]["hidden"] == 32 and len(header["tokenizer"]) == 16
    assert header["metrics"]["tokens"] + header["training"]["tokens"] == 512
    results = tmp_path / "results" / "tiny"
    rows = [line.split(",") for line in (results / "predictor.csv").read_text().splitlines()]
    assert rows[0] == ["predictor", "layer", "hits", "slots", "overlap", "tag"] and len(rows) == 1 + 3 * 3
    assert float(rows[3][4]) == pytest.approx(overlaps[PREDICTOR], abs=1e-6) and rows[3][1] == "all"
    assert "| all" in (results / "predictor.md").read_text()
    assert json.loads((results / "predictor.json").read_text()) == header
    weights = locations.predictor_folder(recipe) / WEIGHTS
    before = weights.read_bytes()
    assert "trained already" in moexp_("train-predictor").stdout
    shutil.rmtree(weights.parent)
    assert moexp_("train-predictor").exit_code == 0 and weights.read_bytes() == before
    assert not list(moexp_home.glob("predictors/*.work"))

    target = open_target(recipe)
    model = open_predictor(recipe, target)
    predictor = LearnedPredictor(model)
    predictor.begin([5, 6], 4)
    routing = predictor.predict(DraftTree.chain(6, [7], [-1.0]))
    assert routing.shape == (2, *np.array([len(target.spec.moe_layers), target.spec.top_k]))
    (weights.parent / "predictor.json").write_text(json.dumps({**header, "target": "f" * 64}))
    refused = moexp_("train-predictor")
    assert refused.exit_code == 2 and "a predictor of another target is there" in refused.stderr
    with pytest.raises(MoexpError, match="a predictor of target ffffffffffff"):
        open_predictor(recipe, target)
    shutil.rmtree(weights.parent)
    with pytest.raises(MoexpError, match="run: moexp train-predictor --recipe tiny"):
        open_predictor(recipe, target)


def test_training_is_on_the_targets_own_embedding(tmp_path: Path):
    folder = tiny_folder(tmp_path / "tiny")
    loaded: Any = load_target(folder).model.get_input_embeddings()
    assert torch.equal(target_embedding(folder).to(loaded.weight.dtype), loaded.weight)
