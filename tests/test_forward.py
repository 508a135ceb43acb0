"""The engine's step: close to transformers' own, invariant to all but a row's own past, frugal in its demands."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from moexp.base.errors import MoexpError
from moexp.runtime.engine.attention import RotaryTable, rotate_half_
from moexp.runtime.engine.engine import AR, VERIFY, Block, Engine
from moexp.runtime.engine.kv import BlockCache, CausalMasks, padded_length
from moexp.runtime.engine.linear import can_pack, fuse_linears, make_linear
from moexp.runtime.engine.moe import StepPath
from moexp.runtime.engine.routing import module_route, sigmoid_route
from moexp.target.draft_expert import DraftExperts
from moexp.target.families import FAMILIES
from moexp.target.load import load_target
from tests.engines import StandInDrafts, WatchedStore, make_engine, prompt, swap_store

EVERY_FAMILY = sorted(FAMILIES)


def run_blocks(engine, ids, prefilled, sizes, path=VERIFY):
    """Logits of ids[prefilled:], decoded in blocks of the given sizes."""
    engine.start(len(ids) + 8)
    engine.prefill(ids[:prefilled])
    return continue_in_blocks(engine, ids, prefilled, sizes, path)


def continue_in_blocks(engine, ids, prefilled, sizes, path=VERIFY):
    """The same, where ids[:prefilled] have been prefilled already."""
    engine.rollback(prefilled)
    rows, at = [], prefilled
    for size in sizes:
        rows.append(engine.run(Block(ids[at : at + size]), path).logits_BV)
        at += size
    assert at == len(ids)
    return torch.cat(rows)


@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_logits_are_transformers_own(tiny_folder, model_type):
    folder = tiny_folder(model_type=model_type)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt(90)
    with torch.no_grad():
        expected = whole(torch.tensor([ids])).logits[0, 70:]
    engine = make_engine(folder)
    # Prefill 70 = two whole chunks of 32 and a part.
    assert torch.allclose(run_blocks(engine, ids, 70, [1, 5, 8, 6]), expected, atol=2e-5, rtol=1e-5)


def test_partial_rotary_and_normalised_queries_are_transformers_own(tmp_path):
    """GLM-4.5's own geometry: half of each head rotates, queries and keys are normalised, projections have a bias."""
    from transformers import AutoConfig

    from moexp.target.tiny import TinyTarget, build_tiny_target

    folder = build_tiny_target(tmp_path, TinyTarget())
    config = AutoConfig.from_pretrained(folder)
    config.use_qk_norm, config.attention_bias = True, True
    config.rope_parameters["partial_rotary_factor"] = 0.5
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in whole.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight", "proj.bias")):
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    whole.save_pretrained(folder)
    ids = prompt(40)
    with torch.no_grad():
        expected = whole.eval()(torch.tensor([ids])).logits[0, 30:]
    assert torch.allclose(run_blocks(make_engine(folder), ids, 30, [8, 2]), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_a_rows_bits_do_not_depend_on_its_block(tiny_folder, model_type, dtype):
    engine = make_engine(tiny_folder(model_type=model_type), dtype, prefill_rows=128)
    prefilled = engine.kv_multiple - 10  # so that the padded key length grows on the way
    ids = prompt(prefilled + 16, seed=3)
    alone = run_blocks(engine, ids, prefilled, [1] * 16, AR)
    for sizes in ([8, 8], [5, 7, 1, 3], [2, 6, 8]):
        assert torch.equal(continue_in_blocks(engine, ids, prefilled, sizes), alone), sizes


def test_a_rows_bits_do_not_depend_on_what_was_rolled_back(tiny_folder):
    engine = make_engine(tiny_folder(dtype=torch.bfloat16), torch.bfloat16)
    ids = prompt(40, seed=5)
    expected = run_blocks(engine, ids, 30, [1] * 10, AR)
    engine.start(60)
    engine.prefill(ids[:30])
    rows = []
    for at in range(30, 40):
        engine.run(Block(prompt(8, seed=at)), VERIFY)  # a block that is rejected as a whole
        engine.run(Block([7]), StepPath("draft", top_r=1))
        engine.rollback(at)
        rows.append(engine.run(Block([ids[at]]), AR).logits_BV)
    assert torch.equal(torch.cat(rows), expected)


def test_order_of_arrival_changes_no_bit(tiny_folder):
    folder = tiny_folder()
    ids = prompt(40)
    expected = run_blocks(make_engine(folder), ids, 20, [5, 8, 7])
    for seed in range(3):
        engine = make_engine(folder, store=WatchedStore.of(folder, seed=seed))
        assert torch.equal(run_blocks(engine, ids, 20, [5, 8, 7]), expected)


def test_padding_demands_nothing_and_every_ticket_is_released(tiny_folder):
    store = WatchedStore.of(tiny_folder())
    engine = make_engine(tiny_folder(), store=store)
    ids = prompt(16)
    engine.start(60)
    engine.prefill(ids[:10])
    out = engine.run(Block(ids[10:13]), VERIFY)
    for layer, keys, routing in zip((1, 2, 3), store.requested("verify"), out.routing_LBk, strict=True):
        assert keys == [(layer, expert) for expert in sorted(set(routing.ravel().tolist()))]
    out = engine.run(Block(ids[13:14]), AR)
    for layer, keys, routing in zip((1, 2, 3), store.requested("ar"), out.routing_LBk, strict=True):
        assert keys == [(layer, expert) for expert in routing[0].tolist()], "by descending gate"
    assert store.open_tickets == 0


def test_a_store_that_fails_leaves_no_ticket_open(tiny_folder):
    class Failing(WatchedStore):
        def arrivals(self, ticket):
            raise MoexpError("the disk is gone")
            yield

    store = Failing.of(tiny_folder())
    engine = make_engine(tiny_folder(), store=store)
    with pytest.raises(MoexpError, match="the disk is gone"):
        engine.prefill([1, 2, 3])
    assert store.open_tickets == 0


def naive_moe(module, index, x_TH, top_r):
    """Shared experts + sum of gate times expert over the top-r by gate, expert by expert in float64."""
    _, gates, ids = module.gate(x_TH)
    output = module.shared_experts(x_TH).double()
    for row in range(len(x_TH)):
        pairs = zip(gates[row].tolist(), ids[row].tolist(), strict=True)
        for gate, expert in sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:top_r]:
            weights = index[expert]
            inner = F.linear(x_TH[row], weights.gate_up)
            inner = F.silu(inner[: len(inner) // 2]) * inner[len(inner) // 2 :]
            output[row] += gate * F.linear(inner, weights.down).double()
    return output


@pytest.mark.parametrize("rows", [1, 8, 32], ids=["draft width", "block", "prefill chunk"])
@pytest.mark.parametrize("top_r", [1, 2, None])
def test_a_moe_layer_is_equation_4_and_5(tiny_folder, rows, top_r):
    engine: Any = make_engine(tiny_folder())
    module = engine.target.model.model.layers[2].mlp
    weights = {expert: w for (layer, expert), w in engine.store.weights.items() if layer == 2}
    x_TH = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    layer = engine._network.layers[2].moe
    live = min(rows, 5)
    expected = naive_moe(module, weights, x_TH[:live], top_r or 4)
    for drafts in (False, True):
        path = StepPath("draft", top_r=top_r, draft_experts=drafts)
        [output], [routing] = layer([x_TH], [live], path, engine.store)
        extra = engine.draft_experts.forward_layer(2, x_TH[:live]) if drafts else 0
        assert torch.allclose(output[:live].double(), expected + extra, atol=1e-5)
        assert routing.shape == (live, 4), "the router's full top-k is told whatever was computed"


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_moe"])
def test_a_draft_step_runs_shared_and_draft_expert_as_one_block(tiny_folder, model_type):
    """With shared experts and without, the sum of both; and the target's own weights stay as they are."""
    spec = load_target(tiny_folder(model_type=model_type)).spec
    drafts = DraftExperts(spec.hidden_size, 24, spec.moe_layers)
    expert: Any
    for expert in drafts.experts.values():
        nn.init.normal_(expert.down, std=0.1)
        nn.init.constant_(expert.scale, 0.7)
    engine = make_engine(tiny_folder(model_type=model_type), draft_experts=drafts)
    plain = make_engine(tiny_folder(model_type=model_type))
    x_TH = torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    for layer in spec.moe_layers:
        moe: Any = engine._network.layers[layer].moe
        alone: Any = plain._network.layers[layer].moe
        shared_TH: Any = 0 if moe.shared is None else moe.shared(x_TH)
        assert torch.allclose(moe.drafting(x_TH), shared_TH + drafts.forward_layer(layer, x_TH), atol=1e-5)
        if moe.shared is not None:
            assert torch.equal(shared_TH, alone.shared(x_TH))


def test_small_bf16_experts_are_computed_in_fp32(tiny_folder):
    """Closer to the truth than bf16 throughout, and that is what the CPU does faster."""
    engine = make_engine(tiny_folder(dtype=torch.bfloat16), torch.bfloat16)
    moe: Any = engine._network.layers[-1].moe
    assert moe.compute[8].dtype == (torch.float32 if engine.device.type == "cpu" else torch.bfloat16)


def test_prefetch_is_announced_with_the_routing_and_never_what_is_demanded(tiny_folder):
    store = WatchedStore.of(tiny_folder())
    engine = make_engine(tiny_folder(), store=store)
    out = engine.run(Block([5]), StepPath("draft", top_r=1, prefetch=True))
    kinds = [kind for kind, _ in store.calls]
    assert kinds == ["draft", "prefetch"] * 3, "demanded first, then announced, layer by layer"
    for layer, demanded, announced, routing in zip(
        (1, 2, 3), store.requested("draft"), store.prefetched(), out.routing_LBk[:, 0].tolist(), strict=True
    ):
        assert demanded == [(layer, routing[0])]
        assert announced == [(layer, expert) for expert in routing[1:]]


def test_draft_steps_see_the_verified_prefix_and_their_own_tokens(tiny_folder):
    """With all experts and no draft expert, a draft path is the target itself, step after step."""
    engine = make_engine(tiny_folder())
    ids = prompt(30)
    expected = run_blocks(engine, ids, 24, [6])
    drafted = run_blocks(engine, ids, 24, [1] * 6, StepPath("draft"))
    assert torch.allclose(drafted, expected, atol=1e-5)
    whole = run_blocks(engine, ids, 24, [1] * 6, StepPath("draft", whole_block=True))
    assert torch.equal(whole, expected), "in the verifier's shape: its very bits"


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_restructured_routing_is_the_modules(tiny_folder, model_type):
    router = load_target(tiny_folder(model_type=model_type)).model.model.layers[1].mlp.gate
    x_TH = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    ids, gates = sigmoid_route(router)(x_TH)
    expected_ids, expected_gates = module_route(router)(x_TH)
    assert (ids == expected_ids).all()
    assert torch.allclose(gates, expected_gates, atol=1e-6)
    assert (gates.diff(dim=-1) <= 0).all(), "by descending gate"


@pytest.mark.parametrize("route", [sigmoid_route, module_route])
def test_equal_gates_are_ordered_by_index(tiny_folder, route):
    router = load_target(tiny_folder()).model.model.layers[1].mlp.gate
    router.weight.zero_()
    router.e_score_correction_bias.zero_()
    router.e_score_correction_bias[[3, 9, 2, 11]] = 1.0  # chosen, with equal gates
    ids, _ = route(router)(torch.randn(8, 64))
    assert ids.tolist() == [[2, 3, 9, 11]] * 8


def test_expert_groups_are_routed_by_the_module(tiny_folder, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(tiny_folder(model_type="deepseek_v3"), tmp_path / "groups")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_group": 4, "topk_group": 2}))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt(20)
    with torch.no_grad():
        expected = whole(torch.tensor([ids])).logits[0, 12:]
    assert torch.allclose(run_blocks(make_engine(folder), ids, 12, [8]), expected, atol=2e-5, rtol=1e-5)


def test_expert_numbers_and_whole_token_prefetch(tiny_folder):
    store = WatchedStore.of(tiny_folder())
    engine = make_engine(tiny_folder(), store=store)
    routing = np.array([[0, 1, 2, 3], [0, 1, 2, 15], [5, 4, 3, 2]], dtype=np.int16)
    assert engine.expert_ids(routing) == [0, 1, 2, 3, 16, 17, 18, 31, 37, 36, 35, 34]
    engine.prefetch(routing)
    assert store.prefetched() == [
        [(layer, e) for layer, row in zip((1, 2, 3), routing.tolist(), strict=True) for e in row]
    ]


def test_requests_follow_each_other_in_one_engine(tiny_folder):
    engine = make_engine(tiny_folder())
    first = run_blocks(engine, prompt(40), 35, [5])
    run_blocks(engine, prompt(700, seed=9), 699, [1])  # more room is needed in between
    assert torch.equal(run_blocks(engine, prompt(40), 35, [5]), first)


def test_stores_can_be_swapped(tiny_folder):
    engine = make_engine(tiny_folder())
    watched = WatchedStore.of(tiny_folder())
    before = swap_store(engine, watched)
    engine.run(Block([1]), AR)
    assert watched.requested("ar")
    assert not before.counters.demanded


def test_wrong_shapes_are_one_clear_error(tiny_folder):
    with pytest.raises(MoexpError, match="step of 5 rows.*multiple of 8"):
        make_engine(tiny_folder(), block=5)
    with pytest.raises(MoexpError, match="5000 positions.*up to 4096"):
        make_engine(tiny_folder()).start(5000)


@given(st.integers(0, 700), st.integers(1, 16), st.integers(1, 3))
def test_masks_are_causal(start, rows, repeat):
    masks = CausalMasks(1024, torch.float32, torch.device("cpu"))
    padded = padded_length(start + rows, 128)
    visible = masks.block(rows, start, padded, repeat=repeat) == 0
    expected = torch.arange(padded)[None] <= start + torch.arange(rows)[:, None]
    assert torch.equal(visible, expected.repeat(repeat, 1))


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_cache_is_a_list_that_is_extended_and_cropped(moves):
    cache, number = BlockCache(2, 128, 32), 0
    model: list[float] = []
    for rows, removed in moves:
        fresh = torch.arange(number, number + rows).float()
        number += rows
        for layer in range(2):
            states = (fresh + 1000 * layer)[None, None, :, None]
            keys, values = cache.write(layer, len(model), states, -states)
            assert keys.shape[2] == padded_length(len(model) + rows, 32)
            assert keys[0, 0, : len(model) + rows, 0].tolist() == [x + 1000 * layer for x in model + fresh.tolist()]
            assert torch.equal(keys, -values)
        model += fresh.tolist()
        removed = min(removed, len(model))
        model = model[: len(model) - removed]
        cache.set_length(len(model))
        assert cache.length == len(model)


def test_rotation_is_rotate_half():
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    class Rotary(nn.Module):
        def forward(self, x, position_ids):
            angle = position_ids[..., None].float() * torch.tensor([1.0, 0.3, 0.1, 0.02] * 2)
            return angle.cos(), angle.sin()

    x_TND = torch.randn(5, 3, 12)
    cos, sin = Rotary()(None, torch.arange(7, 12)[None])
    expected, _ = apply_rotary_pos_emb(x_TND[None], x_TND[None], cos, sin, unsqueeze_dim=2)
    table = RotaryTable(Rotary(), 20, torch.float32, torch.device("cpu"))
    rotate_half_(x_TND, *table.at(slice(7, 12)))
    assert torch.allclose(x_TND, expected[0], atol=1e-6)


def test_fused_and_packed_multiplications_are_the_plain_ones():
    linears = [nn.Linear(32, out, bias=False, dtype=torch.bfloat16).requires_grad_(False) for out in (48, 16)]
    x = torch.randn(8, 32).bfloat16()
    plain = [linear(x) for linear in linears]
    weight, bias = fuse_linears(linears)
    assert bias is None
    assert linears[1].weight.data_ptr() == weight[48:].data_ptr(), "theirs are views of it"
    for pack in (False, True):
        fused = make_linear(weight, rows=8, pack=pack)(x)
        assert torch.allclose(fused.float(), torch.cat(plain, -1).float(), atol=1e-2)
    assert not can_pack(weight.float())


def test_stand_in_drafts_change_the_output(tiny_folder):
    """The tests of draft experts mean something: the stand-ins are not zero."""
    engine = make_engine(tiny_folder())
    logits = partial(run_blocks, engine, prompt(20), 15, [1] * 5)
    with_them = logits(StepPath("draft", top_r=1, draft_experts=True))
    assert (with_them - logits(StepPath("draft", top_r=1))).abs().max() > 0.1


def test_draft_experts_as_trained_are_run_as_they_compute(tiny_folder):
    from moexp.target.draft_expert import DraftExperts

    experts = DraftExperts(64, 24, (1, 2, 3)).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    expert: Any
    for expert in experts.experts.values():
        expert.down.copy_(torch.randn(expert.down.shape, generator=generator) * 0.2)
        expert.scale.fill_(0.7)
    engine: Any = make_engine(tiny_folder(), draft_experts=experts)
    x_TH = torch.randn(1, 64, generator=generator)
    layer = engine._network.layers[3].moe
    [with_it], _ = layer([x_TH], [1], StepPath("draft", top_r=1, draft_experts=True), engine.store)
    [without], _ = layer([x_TH], [1], StepPath("draft", top_r=1), engine.store)
    assert torch.allclose(with_it - without, experts.forward_layer(3, x_TH), atol=1e-5)


def test_engine_takes_any_object_with_forward_layer(tiny_folder):
    target = load_target(tiny_folder())
    drafts = StandInDrafts(64, (1, 2, 3), torch.float32)
    Engine(target, WatchedStore.of(tiny_folder()), draft_experts=drafts)
