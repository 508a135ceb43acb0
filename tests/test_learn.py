"""The draft path, its losses and its measurements, against plain formulas and against the decoding runtime."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from moexp.learn.core.experts import WIDEST, gated_matrices, training_implementation
from moexp.learn.core.logit_loss import logit_loss
from moexp.learn.core.loop import Run, Schedule
from moexp.learn.draft_expert.distill import DistillSettings, distill, teacher_kv_mask, warm_up
from moexp.learn.draft_expert.losses import Weights, residual_loss, router_distribution
from moexp.learn.draft_expert.measure import measure_acceptance, measure_agreement
from moexp.learn.draft_expert.path import DraftPath
from moexp.learn.draft_expert.train import context_starts, start_from_neurons
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Block, Engine
from moexp.runtime.engine.moe import StepPath
from moexp.runtime.store.host import load_experts
from moexp.runtime.store.opening import open_store
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.draft_expert import DraftExperts
from moexp.target.load import load_target
from tests.tiny_models import random_rows, tiny_folder, whole_model

FAMILIES = ("glm4_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("targets")
    return {name: tiny_folder(base / name, model_type=name) for name in FAMILIES}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["glm4_moe"]


def new_experts(path: DraftPath, width: int = 24, seed: int = 0, down: float = 0.1) -> DraftExperts:
    """Draft experts that do something (they start at zero output otherwise)."""
    torch.manual_seed(seed)
    experts = DraftExperts(path.spec.hidden_size, width, path.spec.moe_layers)
    for expert in experts.experts.values():
        expert.down.data.normal_(0.0, down)  # type: ignore[operator]
        expert.scale.data.fill_(0.7)  # type: ignore[operator]
    return experts


def with_experts(folder: Path, **options: Any) -> DraftPath:
    return DraftPath(whole_model(folder), new_experts(DraftPath(whole_model(folder), None), **options))


# --- the loss on logits ---


@pytest.mark.parametrize("kl_weight", [0.0, 0.7])
@pytest.mark.parametrize("token_weight", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_logit_loss_is_what_autograd_makes_of_the_plain_formulas(kl_weight, token_weight, temperature):
    torch.manual_seed(0)
    tokens, hidden, vocab = 150, 12, 40  # more tokens than one chunk
    student_TH = torch.randn(tokens, hidden, requires_grad=True)
    teacher_TH = torch.randn(tokens, hidden)
    student_head_VH, teacher_head_VH = torch.randn(vocab, hidden), torch.randn(vocab, hidden)
    result = logit_loss(
        student_TH, teacher_TH, student_head_VH, teacher_head_VH,
        kl_weight=kl_weight, token_weight=token_weight, temperature=temperature,
    )  # fmt: skip
    (made,) = torch.autograd.grad(result.loss / result.tokens, student_TH)

    student_TV, teacher_TV = student_TH @ student_head_VH.T, teacher_TH @ teacher_head_VH.T
    target_T = teacher_TV.argmax(-1)
    soft = F.kl_div((student_TV / temperature).log_softmax(-1), (teacher_TV / temperature).softmax(-1), reduction="sum")
    nll = F.cross_entropy(student_TV, target_T, reduction="sum")
    plain = kl_weight * temperature**2 * soft + token_weight * nll
    (wanted,) = torch.autograd.grad(plain / tokens, student_TH)

    assert float(result.loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-4, abs=1e-5)
    assert torch.allclose(made, wanted, atol=1e-6, rtol=1e-4)
    at_one = F.kl_div(student_TV.log_softmax(-1), teacher_TV.softmax(-1), reduction="sum")
    assert result.kl == pytest.approx(float(at_one.detach()), rel=1e-4)
    assert result.nll == pytest.approx(float(nll.detach()), rel=1e-4)
    assert result.agree == int((student_TV.argmax(-1) == target_T).sum()) and result.tokens == tokens


def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient():
    torch.manual_seed(0)
    hidden_TH, head_VH = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8)
    result = logit_loss(hidden_TH, hidden_TH.detach(), head_VH, head_VH)
    result.loss.backward()
    assert result.kl == pytest.approx(0.0, abs=1e-4) and result.agree == 9
    assert hidden_TH.grad is not None and hidden_TH.grad.abs().max() < 1e-5


# --- the draft path ---


@pytest.mark.parametrize("family", FAMILIES)
def test_equations_4_to_6_hold_in_every_layer(folders: dict[str, Path], family: str):
    """Full output = shared + gated top-1 + residual; draft output = shared + gated top-1 + scaled draft expert."""
    path = with_experts(folders[family])
    assert path.experts is not None
    rows = random_rows(2, 10).long()
    plain = whole_model(folders[family])
    seen: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for layer in path.spec.moe_layers:
        path.model.model.layers[layer].mlp.register_forward_hook(
            lambda _m, args, out, layer=layer: seen.update(
                {(path.mode, layer): (args[0].flatten(0, 1), (out[0] if type(out) is tuple else out).flatten(0, 1))}
            )
        )
    with torch.no_grad():
        with path.recording("all") as teacher:
            hidden = path.model.model(input_ids=rows).last_hidden_state
        with path.drafting():
            path.model.model(input_ids=rows)
        assert torch.allclose(hidden, plain.model(input_ids=rows).last_hidden_state, atol=1e-5)
        for layer in path.spec.moe_layers:
            block = plain.model.layers[layer].mlp
            for mode in ("target", "draft"):
                x_TH, output_TH = seen[mode, layer]
                _, weight_Tk, index_Tk = getattr(block, path.family.router)(x_TH)
                first_T = weight_Tk.argmax(-1, keepdim=True)
                expert_T1, gate_T1 = index_Tk.gather(1, first_T), weight_Tk.gather(1, first_T)
                top1_TH = gate_T1 * torch.stack(
                    [_expert(block.experts, int(e), x_H) for e, x_H in zip(expert_T1, x_TH, strict=True)]
                )
                shared_TH = getattr(block, path.family.shared)(x_TH) if path.family.shared else 0.0
                rest_TH = teacher[layer].residual_TH if mode == "target" else path.experts.forward_layer(layer, x_TH)
                assert rest_TH is not None and rest_TH.abs().max() > 1e-2
                assert torch.allclose(output_TH, shared_TH + top1_TH + rest_TH, atol=1e-5), (mode, layer)


def _expert(experts: Any, expert: int, x_H: Tensor) -> Tensor:
    if hasattr(experts, "gate_up_proj_bias"):
        gate_up_J = x_H @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
        return experts._apply_gate(gate_up_J) @ experts.down_proj[expert] + experts.down_proj_bias[expert]
    gate_I, up_I = (experts.gate_up_proj[expert] @ x_H).chunk(2)
    return experts.down_proj[expert] @ (F.silu(gate_I) * up_I)


@pytest.mark.parametrize(("r", "drafts"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_runtime_drafts_what_training_trains(folders: dict[str, Path], family: str, r: int, drafts: bool):
    """Two implementations of equation 5, one for batches and one for decoding, after a prefix of the target's own."""
    path = with_experts(folders[family])
    experts = path.experts
    path = DraftPath(path.model, experts if drafts else None, top_r=r)
    ids = random_rows(1, 12, seed=3)[0].tolist()
    with torch.no_grad():
        cache = DynamicCache(config=path.model.config)
        path.model.model(input_ids=torch.tensor([ids[:-1]]), cache=cache)
        path.predicted = {}
        with path.drafting():
            wanted_V = path.model(input_ids=torch.tensor([ids[-1:]]), cache=cache).logits[0, -1]
    target = load_target(folders[family], dtype=torch.float32)
    engine = Engine(target, open_store(target.index, "resident", dtype=torch.float32), draft_experts=experts)
    engine.start(64)
    engine.prefill(ids[:-1])
    made = engine.run(Block(ids[-1:]), StepPath("draft", top_r=r, draft_experts=drafts))
    assert torch.allclose(made.logits_BV[0], wanted_V, atol=1e-4)
    predicted = [index_Tk[0].tolist() for index_Tk in path.predicted.values()]
    assert made.routing_LBk[:, 0].tolist() == predicted


def test_masked_dense_experts_compute_what_eager_experts_compute(folder: Path):
    rows = random_rows(2, 9).long()
    outputs = {}
    for name in ("eager", training_implementation(8, 16)):
        model = whole_model(folder)
        model.requires_grad_(True)
        model.set_experts_implementation(name)
        output = model(input_ids=rows).logits
        output.square().mean().backward()
        experts = model.model.layers[1].mlp.experts
        outputs[name] = (output.detach(), experts.gate_up_proj.grad, experts.down_proj.grad)
    assert set(outputs) == {"eager", "masked_dense"}
    for one, other in zip(*outputs.values(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert training_implementation(WIDEST, 2) == "grouped_mm"


def test_residual_loss_by_hand():
    wanted = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 2.0]])  # powers 25, 1, 4: their median is 4
    made = wanted + torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    assert float(residual_loss(made, wanted)) == pytest.approx(2 * (1 / 29 + 4 / 5 + 0) / 3)
    assert float(residual_loss(wanted, wanted)) == 0.0
    assert float(residual_loss(7 * made, 7 * wanted)) == pytest.approx(float(residual_loss(made, wanted)))
    nothing = float(residual_loss(torch.zeros(3, 2), wanted))
    assert nothing == pytest.approx(2 * (25 / 29 + 1 / 5 + 4 / 8) / 3)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_router_distributions_sum_to_one(scoring: Any):
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 3
    p = router_distribution(logits, scoring).exp()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    assert torch.allclose(p, scores / scores.sum(-1, keepdim=True), atol=1e-6)


# --- context: the teacher's keys and values ---


@given(length=st.integers(1, 14), block=st.integers(1, 16), data=st.data())
def test_the_teacher_kv_mask_is_what_decoding_sees(length: int, block: int, data: st.DataObject):
    offset = data.draw(st.integers(0, block - 1))
    mask = teacher_kv_mask(length, block, offset)
    assert mask.shape == (1, 1, length, 2 * length)
    blocks: list[list[int]] = []
    for position in range(length):
        if not blocks or (position + offset) % block == 0:
            blocks.append([])
        blocks[-1].append(position)
    for number, members in enumerate(blocks):
        before = {position for earlier in blocks[:number] for position in earlier}
        for query in members:
            seen_target = {key for key in range(length) if mask[0, 0, query, key]}
            seen_draft = {key for key in range(length) if mask[0, 0, query, length + key]}
            assert seen_target == before
            assert seen_draft == {key for key in members if key <= query}


def _drafted_with_teacher_kv(path: DraftPath, rows: Tensor, block: int, offset: int) -> Tensor:
    length = rows.shape[1]
    with torch.no_grad():
        cache = DynamicCache(config=path.model.config)
        path.model.model(input_ids=rows, cache=cache)
        with path.drafting():
            return path.model.model(
                input_ids=rows,
                cache=cache,
                attention_mask=teacher_kv_mask(length, block, offset),
                position_ids=torch.arange(length)[None],
            ).last_hidden_state


def test_with_a_block_as_long_as_the_text_teacher_kv_is_plain_teacher_forcing(folder: Path):
    path, rows = with_experts(folder), random_rows(2, 12).long()
    with torch.no_grad(), path.drafting():
        plain = path.model.model(input_ids=rows).last_hidden_state
    assert torch.allclose(_drafted_with_teacher_kv(path, rows, 12, 0), plain, atol=1e-5)
    assert not torch.allclose(_drafted_with_teacher_kv(path, rows, 3, 0), plain, atol=1e-2)


def test_a_teacher_kv_pass_is_drafting_block_by_block_behind_the_targets_own_cache(folder: Path):
    path, rows, block, offset = with_experts(folder), random_rows(2, 12).long(), 4, 3
    at_once = _drafted_with_teacher_kv(path, rows, block, offset)
    for begin in range(block - offset, 12, block):
        with torch.no_grad():
            cache = DynamicCache(config=path.model.config)
            path.model.model(input_ids=rows[:, :begin], cache=cache)
            for position in range(begin, min(begin + block, 12)):
                with path.drafting():
                    out = path.model.model(input_ids=rows[:, position : position + 1], cache=cache)
                assert torch.allclose(out.last_hidden_state[:, 0], at_once[:, position], atol=1e-5)


# --- training ---


def _settings(**changes: Any) -> DistillSettings:
    values: dict[str, Any] = {
        "warmup": Schedule(steps=12, lr=1e-2, warmup=2),
        "main": Schedule(steps=12, lr=1e-2, warmup=2),
        "rows": 4,
        "warmup_rows": 4,
        "block": 4,
    }
    return DistillSettings(**values | changes)


def test_the_warm_up_learns_the_residual_and_leaves_the_target_alone(folder: Path):
    path = with_experts(folder, down=0.0)
    before = {name: tensor.clone() for name, tensor in path.model.state_dict().items()}
    log: list[float] = []
    watch = Run(on_step=lambda step, metrics: log.append(metrics["residual"]))
    warm_up(path, random_rows(8, 24), _settings(), watch)
    assert log[-1] < 0.97 * log[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in path.model.state_dict().items())


@pytest.mark.parametrize("context", ["teacher-forcing", "teacher-kv"])
def test_distillation_brings_the_draft_nearer_to_the_target(folder: Path, context: Any):
    path = with_experts(folder, down=0.0)
    assert path.experts is not None
    before = {name: tensor.clone() for name, tensor in path.model.state_dict().items()}
    rows = random_rows(8, 24)
    start = measure_agreement(path, rows)
    log: list[dict[str, float]] = []
    distill(path, rows, _settings(context=context), Run(on_step=lambda step, metrics: log.append(metrics)))
    end = measure_agreement(path, rows)
    assert end.kl < 0.95 * start.kl
    assert all(torch.equal(tensor, before[name]) for name, tensor in path.model.state_dict().items())
    assert all(metrics["residual"] > 0 and metrics["router"] > 0 for metrics in log)


@pytest.mark.parametrize("term", ["logit", "token", "residual", "router"])
def test_each_term_alone_trains_and_all_switched_off_train_nothing(folder: Path, term: str):
    off = {"logit": 0.0, "token": 0.0, "residual": 0.0, "router": 0.0}
    gradients = {}
    for name, weights in (("alone", off | {term: 1.0}), ("off", off)):
        path = with_experts(folder)
        assert path.experts is not None
        once = _settings(weights=Weights(**weights), main=Schedule(steps=1, lr=1e-2, warmup=1))
        before = path.experts.experts["1"].down.detach().clone()  # type: ignore[operator]
        distill(path, random_rows(4, 16), once)
        gradients[name] = float((path.experts.experts["1"].down.detach() - before).abs().max())  # type: ignore[operator]
    assert gradients["alone"] > 1e-3 and gradients["off"] == 0.0


def test_both_stages_resume_bit_for_bit_after_ctrl_c(folder: Path, tmp_path: Path):
    rows = random_rows(8, 16)
    settings = _settings(main=Schedule(steps=4, lr=1e-2, warmup=2), warmup=Schedule(steps=4, lr=1e-2, warmup=2))

    def interrupt(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    for stage in (warm_up, distill):
        whole, first, second = (with_experts(folder) for _ in range(3))
        stage(whole, rows, settings)
        place = tmp_path / stage.__name__
        with pytest.raises(KeyboardInterrupt):
            stage(first, rows, settings, Run(place, "x", interrupt))
        log: list[Any] = []
        stage(second, rows, settings, Run(place, "x", lambda *args: log.append(args)))  # noqa: B023
        assert [step for step, _ in log] == [3, 4]
        assert second.experts is not None and whole.experts is not None
        pairs = zip(second.experts.parameters(), whole.experts.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_starting_from_the_neurons_is_nearer_to_the_residual_than_nothing(folder: Path):
    rows = random_rows(4, 24)
    path = DraftPath(whole_model(folder), None)
    experts = DraftExperts(32, 8 * 16, path.spec.moe_layers)
    start_from_neurons(path, experts, rows)
    errors: dict[str, float] = {}
    with torch.no_grad(), path.recording("all") as teacher:
        captured: dict[int, Tensor] = {}
        for layer in path.spec.moe_layers:
            path.model.model.layers[layer].mlp.register_forward_pre_hook(
                lambda _m, args, layer=layer: captured.update({layer: args[0].flatten(0, 1)})
            )
        path.model.model(input_ids=rows.long())
        for name, scale in (("made", 1.0), ("nothing", 0.0)):
            errors[name] = 0.0
            for layer in path.spec.moe_layers:
                wanted_TH = teacher[layer].residual_TH
                assert wanted_TH is not None
                errors[name] += float(residual_loss(scale * experts.forward_layer(layer, captured[layer]), wanted_TH))
    assert errors["made"] < 0.8 * errors["nothing"]


# --- measuring ---


def test_a_draft_path_with_all_experts_agrees_in_everything(folder: Path):
    path = DraftPath(whole_model(folder), None, top_r=3)
    rows = random_rows(4, 24)
    agreement = measure_agreement(path, rows, batch=2)
    assert agreement.agreement == 1.0 and agreement.router_agreement == pytest.approx(1.0)
    assert agreement.kl == pytest.approx(0.0, abs=1e-4) and agreement.tokens == 4 * 24
    acceptance = measure_acceptance(path, rows, [8, 16])
    assert acceptance.acceptance == 1.0 and acceptance.blocks == 8
    assert acceptance.by_position == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("r", "drafts"), [(2, False), (1, True)])
def test_batched_acceptance_is_what_decoding_from_those_contexts_accepts(folder: Path, r: int, drafts: bool):
    path = with_experts(folder)
    experts = path.experts
    path = DraftPath(path.model, experts if drafts else None, top_r=r)
    rows, starts = random_rows(6, 24), [8, 20]
    measured = measure_acceptance(path, rows, starts)
    target = load_target(folder, dtype=torch.float32)
    engine = Engine(target, open_store(target.index, "resident", dtype=torch.float32), draft_experts=experts)
    method = Method("draft-expert" if drafts else "top-r", r=r, max_draft=4)
    accepted, unique_draft, unique_verify = list[int](), list[Any](), list[Any]()
    for start in starts:
        for row in rows:
            steps, _ = decode_all(engine, row[:start].tolist(), method, Sampling(), max_new_tokens=5)
            accepted.append(steps[0].accepted)
            unique_draft.append(steps[0].unique_draft)
            unique_verify.append(steps[0].unique_verify)
    assert 0.0 < measured.acceptance < 1.0  # else this compares nothing
    assert measured.acceptance == pytest.approx(sum(accepted) / (4 * len(accepted)))
    assert measured.unique_draft == pytest.approx(sum(unique_draft) / len(unique_draft))
    assert measured.unique_verify == pytest.approx(sum(unique_verify) / len(unique_verify))


def test_held_out_blocks_start_where_a_row_has_text():
    assert context_starts(256) == [64, 88, 112, 136, 160, 184, 208, 232]
    assert context_starts(128) == [64, 88, 112]
    assert context_starts(32) == [16]


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_gated_matrices_are_what_the_store_serves(folders: dict[str, Path], family: str):
    """Draft experts start from an expert's neurons, however its family lays them out."""
    target = load_target(folders[family], dtype=torch.float32)
    served = load_experts(target.index, torch.float32)
    whole = whole_model(folders[family])
    for layer in target.spec.moe_layers:
        gate_up_EJH, down_EHI = gated_matrices(whole.model.layers[layer].mlp.experts)
        for expert in range(target.spec.num_experts):
            assert torch.equal(gate_up_EJH[expert], served[layer, expert].gate_up)
            assert torch.equal(down_EHI[expert], served[layer, expert].down)
