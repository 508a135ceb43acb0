"""`build-target` on a small dense model: carve, repair, save; interrupted and resumed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moexp.base.errors import MoexpError
from moexp.config.recipe import Recipe, load_recipe
from moexp.config.target import DeltaSection
from moexp.learn.core.loop import Run, Schedule
from moexp.learn.target import build
from moexp.learn.target.build import build_target, read_manifest, repairs_before
from moexp.learn.target.quality import measure_quality
from moexp.learn.target.repair import RepairSettings, moe_layers, prepare, repair_end_to_end, repair_layerwise
from moexp.learn.target.routing import LoadBalancer, RoutingLocality, new_share
from moexp.target.carve import Geometry, calibrate, carve
from moexp.target.load import load_target
from moexp.target.tiny import TinyTarget, build_tiny_target
from tests.tiny_models import dense_folder, dense_model, random_rows

pytestmark = pytest.mark.e2e

SETTINGS = RepairSettings(
    layerwise=Schedule(steps=8, lr=2e-3, warmup=2), end_to_end=Schedule(steps=8, lr=1e-3, warmup=2), rows=4
)


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory) -> Path:
    return dense_folder(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture
def recipe(dense_path: Path) -> Recipe:
    return load_recipe(
        "tiny",
        [
            "target.kind=carved",
            "target.source=hub",
            f"target.path={dense_path}",
            "target.carve={shared_neurons: 32, routed_experts: 8, top_k: 3, expert_width: 8, calibration_tokens: 200}",
            "target.corpus={source: write, author: dense, tokens: 1000, rows: 8, length: 32}",
            "target.repair={layerwise_steps: 6, layerwise_lr: 1e-2, e2e_steps: 6, e2e_lr: 1e-2, rows: 4}",
            "target.repair={bias_rate: 0.01, max_minutes: null}",
            "target.pad_expert_width=16",
        ],
    )


@pytest.fixture(autouse=True)
def short_answers(monkeypatch) -> None:
    monkeypatch.setattr(build, "sample_answers", lambda model, tokenizer: [{"question": "q", "answer": "a"}])


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_carved_target_is_a_standard_checkpoint_with_what_was_measured(recipe: Recipe, tmp_path: Path):
    folder = tmp_path / "target"
    padded = build_target(recipe, folder, cache=tmp_path / "cache", provenance={"seed": 0})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Glm4MoeForCausalLM"
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert load_target(folder).spec.num_experts == 8 and load_target(padded).spec.expert_width == 16

    manifest = read_manifest(folder)
    assert read_manifest(padded) == manifest
    carved, repaired = manifest["quality"]["carved"], manifest["quality"]["repaired"]
    assert set(repaired["nats"]) == {"top-3", "top-1", "top-0"}
    assert repaired["kl"] != carved["kl"] and repaired["tokens"] == carved["tokens"] == 24 * 31
    assert manifest["provenance"] == {"seed": 0} and manifest["origin"].startswith("hub ")
    assert not list(tmp_path.glob("target.work/repair"))

    before = weights(folder)
    build_target(recipe, folder, cache=tmp_path / "cache", provenance={"seed": 1})
    assert weights(folder) == before and read_manifest(folder) == manifest  # done is done


@pytest.mark.parametrize("stage", ["layerwise", "end_to_end"])
def test_a_build_stopped_by_ctrl_c_and_resumed_is_bit_for_bit_the_uninterrupted_one(
    recipe: Recipe, tmp_path: Path, monkeypatch, stage: str
):
    whole = tmp_path / "whole"
    monkeypatch.setattr(build, "corpus_rows", lambda *args, **kwargs: random_rows(30, 32))
    build_target(recipe, whole, cache=tmp_path, provenance={})
    running = getattr(build, f"repair_{stage}")

    def interrupted(*args: Any, run: Run) -> None:
        def watch(step: int, metrics: dict[str, float]) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)
            run.on_step(step, metrics)

        running(*args, run=replace(run, on_step=watch))

    folder = tmp_path / "resumed"
    with monkeypatch.context() as patch:
        patch.setattr(build, f"repair_{stage}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_target(recipe, folder, cache=tmp_path, provenance={})
    assert not folder.exists()
    build_target(recipe, folder, cache=tmp_path, provenance={})
    assert weights(folder) == weights(whole)


def test_repair_brings_the_model_nearer_to_the_dense_one_in_both_stages():
    dense = dense_model(dtype=torch.bfloat16)
    rows = random_rows(16, 24)
    calibration = calibrate(dense, iter(rows[:8].long().split(4)), range(1, 3))
    model, plans = carve(dense, calibration, Geometry(32, 8, 3, 8))
    prepare(model)
    embedding: Any = model.get_input_embeddings()
    before = embedding.weight.detach().clone()
    kl = [measure_quality(model, dense, rows).kl]
    model.train()
    log: list[float] = []
    watch = Run(on_step=lambda step, metrics: log.append(metrics["residual"]))
    repair_layerwise(model, dense, plans, rows, SETTINGS, watch)
    kl.append(measure_quality(model, dense, rows).kl)
    model.train()
    repair_end_to_end(model, dense, rows, SETTINGS)
    kl.append(measure_quality(model, dense, rows).kl)
    assert log[-1] < log[0]
    assert kl[0] > kl[1] > kl[2]
    assert torch.equal(embedding.weight, before)


def test_the_balancer_moves_the_bias_against_the_load():
    dense = dense_model()
    calibration = calibrate(dense, iter([random_rows(4, 24).long()]), range(1, 3))
    model, _ = carve(dense, calibration, Geometry(32, 8, 3, 8))
    gate = moe_layers(model)[1].gate
    balancer = LoadBalancer(model, 0.5)
    chosen: list[torch.Tensor] = []
    gate.register_forward_hook(lambda _m, _a, out: chosen.append(out[2]))
    with torch.no_grad(), balancer.watching():
        model(input_ids=random_rows(4, 24).long())
    load = torch.bincount(chosen[0].flatten(), minlength=8).float()
    worst = balancer.update()
    assert torch.equal(gate.e_score_correction_bias, 0.5 * (load.mean() - load).sign())
    assert worst >= float(load.max() / load.mean())
    assert balancer.state()["0"] is gate.e_score_correction_bias  # what a checkpoint must hold


def test_new_experts_are_those_that_the_tokens_before_have_not_used():
    scores_TE = torch.tensor([[9, 9, 1, 0], [9, 1, 9, 0], [1, 9, 9, 0], [1, 0, 9, 9]]).float()
    index_Tk = scores_TE.topk(2).indices
    # each token brings one expert that the one before it had not; with two to look back at, the third brings none
    assert float(new_share(scores_TE, index_Tk, 4, window=1, sharpness=0.1)) == pytest.approx(1 / 2)
    assert float(new_share(scores_TE, index_Tk, 4, window=2, sharpness=0.1)) == pytest.approx((0 + 1 / 2) / 2)
    # two rows of two tokens do not see each other
    assert float(new_share(scores_TE, index_Tk, 2, window=1, sharpness=0.1)) == pytest.approx(1 / 2)
    scores_TE.requires_grad_()
    new_share(scores_TE, index_Tk, 4, window=1, sharpness=1.0).backward()
    assert scores_TE.grad is not None
    assert float(scores_TE.grad[3, 3]) > 0 > float(scores_TE.grad[3, 2])  # the new one down, the kept one up


def test_routers_learn_locality_from_what_changes_slowly():
    torch.manual_seed(0)
    rows, length, slow, fast = 8, 24, 6, 6
    steps_BLS = torch.randn(rows, length, slow)
    for place in range(1, length):  # features that a token shares with the one before, beside others that it does not
        steps_BLS[:, place] = 0.95 * steps_BLS[:, place - 1] + 0.3 * steps_BLS[:, place]
    x_TH = torch.cat([steps_BLS, torch.randn(rows, length, fast)], dim=-1).flatten(0, 1)
    weight_EH = (torch.randn(16, slow + fast) / 4).requires_grad_()
    optimizer = torch.optim.Adam([weight_EH], lr=0.03)
    new = []
    for _ in range(60):
        score_TE = torch.sigmoid(x_TH @ weight_EH.T)
        loss = new_share(score_TE, score_TE.topk(3).indices, length, window=4, sharpness=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        new.append(float(loss.detach()))
    assert new[-1] < 0.7 * new[0]
    strength_H = weight_EH.detach().norm(dim=0)
    assert strength_H[:slow].mean() > strength_H[slow:].mean()


def test_locality_is_for_the_routers_alone():
    dense, rows = dense_model(dtype=torch.bfloat16), random_rows(4, 24)
    model, _ = carve(dense, calibrate(dense, iter([rows.long()]), range(1, 3)), Geometry(32, 16, 2, 4))
    prepare(model)
    watch = RoutingLocality(model, rows.shape[1])
    with watch.watching():
        model(input_ids=rows.long())
    watch.take().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {
        f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2)
    }
    seen: set[str] = set()
    run = Run(on_step=lambda step, metrics: seen.update(metrics))
    repair_end_to_end(model, dense, rows, replace(SETTINGS, locality=0.1), run=run)
    assert "moved" in seen


def test_quality_without_routed_experts_is_that_of_the_shared_ones_alone():
    dense = dense_model(dtype=torch.bfloat16)
    rows = random_rows(4, 24)
    calibration = calibrate(dense, iter([rows.long()]), range(1, 3))
    model, _ = carve(dense, calibration, Geometry(32, 8, 3, 8))
    quality = measure_quality(model, dense, rows)
    with torch.no_grad():
        logits = model(input_ids=rows.long()).logits[:, :-1].flatten(0, 1)
    plain = float(torch.nn.functional.cross_entropy(logits, rows[:, 1:].long().flatten()))
    assert quality.nats["top-3"] == pytest.approx(plain, rel=2e-2)
    for block in moe_layers(model).values():
        block.experts.down_proj.data.zero_()
    silenced = measure_quality(model, dense, rows)
    assert silenced.nats["top-3"] == pytest.approx(quality.nats["top-0"], rel=1e-3)
    assert quality.nats["top-0"] != pytest.approx(quality.nats["top-3"], rel=1e-3)
    assert quality.dense_nats == silenced.dense_nats


def test_a_tiny_target_is_whole_or_not_there_and_follows_its_recipe(tmp_path: Path, monkeypatch):
    recipe = load_recipe(
        "tiny", ["target.tiny.model_type=deepseek_v3", "target.tiny.first_dense=2", "target.pad_expert_width=40"]
    )

    def torn(into: Path, tiny: TinyTarget) -> Path:
        build_tiny_target(into, tiny)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "build_tiny_target", torn)
        build_target(recipe, tmp_path / "target", cache=tmp_path, provenance={})
    assert not (tmp_path / "target").exists()
    padded = build_target(recipe, tmp_path / "target", cache=tmp_path, provenance={})
    spec = load_target(padded).spec
    assert (spec.model_type, spec.moe_layers, spec.expert_width, spec.num_experts) == ("deepseek_v3", (2,), 40, 8)


def test_what_cannot_be_built_is_an_error(recipe: Recipe, dense_path: Path, tmp_path: Path):
    hub = load_recipe("ds-v2-lite")
    with pytest.raises(MoexpError, match="nothing to build"):
        build_target(hub, tmp_path / "target", cache=tmp_path, provenance={})
    carve = recipe.target.carve.model_copy(update={"routed_experts": 7})
    bad = recipe.model_copy(update={"target": recipe.target.model_copy(update={"carve": carve})})
    with pytest.raises(MoexpError, match="do not split"):
        build_target(bad, tmp_path / "target", cache=tmp_path, provenance={})
    nowhere = recipe.target.model_copy(update={"path": str(tmp_path / "nowhere")})
    with pytest.raises(MoexpError, match="cannot load"):
        build_target(recipe.model_copy(update={"target": nowhere}), tmp_path / "t", cache=tmp_path, provenance={})


def test_a_target_rebuilt_from_its_delta_is_the_trained_one_bit_for_bit(recipe: Recipe, tmp_path: Path):
    with_delta = recipe.model_copy(
        update={
            "target": recipe.target.model_copy(
                update={
                    "repair": recipe.target.repair.model_copy(
                        update={"scope": "delta", "delta": DeltaSection(density=0.2, steps=4, lr=1e-3)}
                    )
                }
            )
        }
    )
    trained, rebuilt = tmp_path / "trained", tmp_path / "rebuilt"
    build_target(with_delta, trained, cache=tmp_path, provenance={})
    delta = trained / "repair.delta"
    from_delta = recipe.model_copy(update={"target": recipe.target.model_copy(update={"delta": str(delta)})})
    build_target(from_delta, rebuilt, cache=tmp_path, provenance={})
    assert weights(rebuilt) == weights(trained)
    one, two = read_manifest(trained), read_manifest(rebuilt)
    assert one["quality"]["repaired"] == two["quality"]["repaired"] and two["delta"] == str(delta)
    assert one["repair"] == two["repair"] and two["repair"]["delta"]["steps"] == 4
    assert not list(tmp_path.glob("rebuilt.work/repair"))

    repair = with_delta.target.repair.model_copy(update={"start": str(delta), "layerwise_steps": 0, "e2e_steps": 0})
    further = with_delta.model_copy(update={"target": with_delta.target.model_copy(update={"repair": repair})})
    build_target(further, tmp_path / "further", cache=tmp_path, provenance={})
    three = read_manifest(tmp_path / "further")
    assert three["quality"]["start"]["nats"] == pytest.approx(one["quality"]["repaired"]["nats"], rel=1e-2)
    assert three["repair"]["earlier"] == one["repair"] and weights(tmp_path / "further") != weights(trained)


def test_each_repair_of_a_delta_is_counted():
    first: dict[str, Any] = {"tokens": 10}
    second = {"tokens": 10, "earlier": first}
    assert [repairs_before(details) for details in ({}, first, {**second, "earlier": None}, second)] == [0, 1, 1, 2]
