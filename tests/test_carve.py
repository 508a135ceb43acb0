from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Glm4MoeForCausalLM, LlamaForCausalLM

from moexp.base.errors import MoexpError
from moexp.learn.target.repair import moe_layers
from moexp.target.carve import (
    Geometry,
    LayerPlan,
    balanced_clusters,
    calibrate,
    carve,
    fit_router,
    plan_layer,
    split_neurons,
)
from tests.tiny_models import dense_model, random_rows


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    return dense_model()


def carved(dense: LlamaForCausalLM, **changes: Any) -> tuple[Glm4MoeForCausalLM, list[LayerPlan]]:
    values: dict[str, Any] = {"shared_neurons": 32, "routed_experts": 8, "top_k": 3, "expert_width": 8}
    layers = range(1, dense.config.num_hidden_layers)
    calibration = calibrate(dense, iter(random_rows(8, 24).long().split(4)), layers)
    model, plans = carve(dense, calibration, Geometry(**values | changes))
    return model.eval(), plans


def logits(model: Any, seed: int = 1) -> Tensor:
    with torch.no_grad():
        return model(input_ids=random_rows(2, 20, seed).long()).logits


@pytest.mark.parametrize("width", [8, 16], ids=["exact width", "spare neurons"])
def test_with_all_experts_active_the_carved_model_is_the_dense_one(dense: LlamaForCausalLM, width: int):
    model, _ = carved(dense, top_k=8, expert_width=width)
    assert model.config.routed_scaling_factor == 8.0
    for block in moe_layers(model).values():
        block.gate.weight.data.zero_()  # equal scores: after normalising and scaling every gate is 1
    assert (logits(model) - logits(dense)).abs().max() < 1e-4
    for block in moe_layers(model).values():
        block.experts.down_proj.data[0] += 0.1
    assert (logits(model) - logits(dense)).abs().max() > 1e-2


def test_with_few_experts_active_it_is_near_the_dense_model_but_not_it(dense: LlamaForCausalLM):
    with_three, with_one = (logits(carved(dense, top_k=top_k)[0]) for top_k in (6, 1))
    wanted = logits(dense)
    assert 1e-3 < (with_three - wanted).abs().mean() < (with_one - wanted).abs().mean()


def test_each_neuron_goes_to_one_place_and_keeps_its_weights(dense: LlamaForCausalLM):
    model, plans = carved(dense)
    for (layer, block), plan in zip(moe_layers(model).items(), plans, strict=True):
        mlp: Any = dense.model.layers[layer].mlp
        shared = block.shared_experts.gate_proj.weight
        routed = block.experts.gate_up_proj[:, :8].flatten(0, 1)
        rows = torch.cat([shared, routed])
        assert torch.equal(rows.sort(dim=0).values, mlp.gate_proj.weight.sort(dim=0).values)
        expert, place = 5, 2
        neuron = plan.own_En[expert, place]
        assert torch.equal(block.experts.gate_up_proj[expert, 8 + place], mlp.up_proj.weight[neuron])
        assert torch.equal(block.experts.down_proj[expert, :, place], mlp.down_proj.weight[:, neuron])
    assert not hasattr(model.model.layers[0].mlp, "experts")


@given(clusters=st.integers(1, 6), size=st.integers(1, 5), tokens=st.integers(2, 12), seed=st.integers(0, 999))
def test_balanced_clusters_are_a_partition_of_equal_sizes(clusters: int, size: int, tokens: int, seed: int):
    activity_TR = torch.rand(tokens, clusters * size, generator=torch.Generator().manual_seed(seed))
    groups = balanced_clusters(activity_TR, clusters, size, rounds=2)
    assert groups.shape == (clusters, size)
    assert groups.flatten().sort().values.tolist() == list(range(clusters * size))


def test_neurons_that_fire_together_are_clustered_together():
    pattern_TC = torch.rand(200, 4, generator=torch.Generator().manual_seed(0)) ** 4
    owner_R = torch.randperm(20, generator=torch.Generator().manual_seed(1)) % 4
    groups = balanced_clusters(pattern_TC[:, owner_R], 4, 5, rounds=6)
    assert all(len(set(owner_R[group].tolist())) == 1 for group in groups)


@given(experts=st.integers(1, 4), size=st.integers(1, 4), shared=st.integers(1, 6), seed=st.integers(0, 99))
def test_the_most_active_neurons_are_shared_and_the_rest_is_split(experts: int, size: int, shared: int, seed: int):
    shared *= size
    neurons = shared + experts * size
    contribution_TN = torch.rand(9, neurons, generator=torch.Generator().manual_seed(seed))
    shared_S, groups_En = split_neurons(contribution_TN, Geometry(shared, experts, 1, size))
    power = contribution_TN.pow(2).mean(0)
    assert torch.cat([shared_S, groups_En.flatten()]).sort().values.tolist() == list(range(neurons))
    assert power[shared_S].min() >= power[groups_En.flatten()].max()


def test_the_router_finds_the_experts_whose_neurons_are_active():
    generator = torch.Generator().manual_seed(0)
    x_TH, planted_EH = torch.randn(400, 16, generator=generator), torch.randn(6, 16, generator=generator)
    energy_TE = (x_TH @ planted_EH.T).exp()
    router_EH = fit_router(x_TH, energy_TE)
    fresh_TH = torch.randn(100, 16, generator=generator)
    assert ((fresh_TH @ router_EH.T).argmax(-1) == (fresh_TH @ planted_EH.T).argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_neurons": 96}, "do not split"),
        ({"routed_experts": 7}, "do not split"),
        ({"expert_width": 4}, "expert_width 4 does not fit.*at least 8"),
        ({"shared_neurons": 40, "routed_experts": 7, "expert_width": 16}, "a divisor of shared_neurons"),
    ],
)
def test_a_geometry_that_cannot_be_is_an_error_that_says_what_can(changes: dict[str, int], message: str):
    values = {"shared_neurons": 32, "routed_experts": 8, "top_k": 3, "expert_width": 8} | changes
    with pytest.raises(MoexpError, match=message):
        Geometry(**values).neurons_per_expert(96)


def test_spares_are_neurons_missed_where_the_expert_is_chosen():
    # tokens of kind c fire the neurons of cluster c, and half of them neuron 0 of the next cluster as well
    tokens, clusters, size = 240, 4, 3
    kind_T = torch.arange(tokens) % clusters
    shared = size + 1
    contribution_TN = torch.full((tokens, shared + clusters * size), 0.01)
    contribution_TN[:, :shared] = 9.0
    for cluster in range(clusters):
        first, after = shared + cluster * size, shared + (cluster + 1) % clusters * size
        contribution_TN[kind_T == cluster, first : first + size] = 1.0
        contribution_TN[(kind_T == cluster) & (torch.arange(tokens) % 8 < 4), after] = 0.5
    contribution_TN += 0.01 * torch.rand(contribution_TN.shape, generator=torch.Generator().manual_seed(0))
    plan = plan_layer(contribution_TN, Geometry(shared, clusters, 1, size + 1, cluster_rounds=6))
    assert plan.shared_S.tolist() == list(range(shared)) and plan.spare_Em.shape == (clusters, 1)
    for own_n, spare_m in zip(plan.own_En, plan.spare_Em, strict=True):
        cluster = (int(own_n[0]) - shared) // size
        assert own_n.tolist() == [shared + cluster * size + place for place in range(size)]
        assert spare_m.tolist() == [shared + (cluster + 1) % clusters * size]
