from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeForCausalLM

from moexp.base.errors import MoexpError
from moexp.learn.target.repair import delivered, prepare
from moexp.target.carve import Geometry, calibrate, carve
from moexp.target.delta import (
    _pack_trits,
    _unpack_trits,
    apply_delta,
    as_delivered,
    coded_bases,
    encode,
    find_delta,
    kind_of,
    save_delta,
    stored,
)
from tests.tiny_models import dense_model, random_rows

GEOMETRY = Geometry(32, 8, 3, 16)


def repaired(seed: int = 0) -> tuple[Glm4MoeForCausalLM, Any, Any]:
    """A carved model whose MoE blocks and norms have moved a little, its dense model and its plans."""
    dense = dense_model(dtype=torch.bfloat16)
    calibration = calibrate(dense, iter([random_rows(8, 24).long()]), range(1, 3))
    model, plans = carve(dense, calibration, GEOMETRY)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in stored(model):
        step = torch.randn(tensor.shape, generator=generator) * 0.05
        tensor.add_(step.sign() * step.square() * 20 if kind_of(name) == "ternary" else step)
    return model, dense, plans


@given(count=st.integers(1, 60), seed=st.integers(0, 99))
def test_trits_survive_packing(count: int, seed: int):
    codes = np.random.default_rng(seed).integers(-1, 2, count).astype(np.int8)
    packed = _pack_trits(codes)
    assert len(packed) == -(-count // 5)
    assert np.array_equal(_unpack_trits(packed, count), codes)


@given(density=st.floats(0.05, 0.4), seed=st.integers(0, 99))
def test_the_largest_entries_are_kept_at_one_step_a_neuron(density: float, seed: int):
    difference = torch.randn(4, 24, 40, generator=torch.Generator().manual_seed(seed))
    coded = encode("x.mlp.experts.gate_up_proj", difference, density)
    kept = coded.codes_RH != 0
    rows = difference.view(96, 40)
    assert kept.float().mean() == pytest.approx(density, abs=0.02)
    assert rows[kept].abs().min() >= rows[~kept].abs().max()
    assert torch.equal(coded.codes_RH[kept], rows[kept].sign().to(torch.int8))
    for row in range(96):
        if kept[row].any():
            assert float(coded.scale_R[row]) == pytest.approx(float(rows[row][kept[row]].abs().mean()), rel=1e-3)


def test_down_projections_are_coded_by_neuron_and_routers_in_eight_bits():
    down = torch.zeros(2, 6, 4)
    down[1, :, 2] = torch.tensor([3.0, -3.0, 3.0, -3.0, 3.0, 3.0])
    coded = encode("x.mlp.experts.down_proj", down, 6 / 48)
    assert coded.codes_RH.shape == (8, 6)
    assert coded.codes_RH[6].tolist() == [1, -1, 1, -1, 1, 1] and int(coded.codes_RH.abs().sum()) == 6
    assert torch.equal(coded.decode(down, "x.mlp.experts.down_proj"), down)
    router = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    back = encode("x.mlp.gate.weight", router, 0.1).decode(router, "x.mlp.gate.weight")
    assert (back - router).abs().max() <= router.abs().max() / 127


def test_a_delta_gives_back_what_training_computed_with_and_dense_parts_as_they_were(tmp_path: Path):
    model, dense, plans = repaired()
    save_delta(tmp_path / "d", model, dense, plans, GEOMETRY, 0.2, {"steps": 3})
    rebuilt = apply_delta(tmp_path / "d", dense, GEOMETRY)
    built = rebuilt.model
    assert rebuilt.details == {"steps": 3}
    calibration = calibrate(dense, iter([random_rows(8, 24).long()]), range(1, 3))
    bases = coded_bases(carve(dense, calibration, GEOMETRY)[0])
    assert bases.keys() == rebuilt.bases.keys()
    assert all(torch.equal(bases[name], rebuilt.bases[name]) for name in bases)
    for plan, again in zip(plans, rebuilt.plans, strict=True):
        assert torch.equal(plan.own_En, again.own_En) and torch.equal(plan.spare_Em, again.spare_Em)
    with delivered(model, bases, 0.2):
        for (name, mine), (_, theirs) in zip(stored(model), stored(built), strict=True):
            if kind_of(name) != "plain":
                assert torch.equal(mine, theirs), name
            else:
                assert torch.equal(mine.bfloat16(), theirs.bfloat16()), name
    for name, parameter in built.named_parameters():
        if kind_of(name) == "dense":
            assert torch.equal(parameter, dict(model.named_parameters())[name]), name


def test_weights_come_back_after_a_step_and_only_a_deltas_are_trained():
    model, _, _ = repaired()
    prepare(model, "delta")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in stored(model) if not name.endswith("bias")}
    bases = {name: torch.zeros_like(t) for name, t in stored(model) if kind_of(name) == "ternary"}
    before = {name: tensor.clone() for name, tensor in stored(model)}
    with pytest.raises(RuntimeError, match="stop"), delivered(model, bases, 0.1):
        name = next(iter(bases))
        now = dict(model.named_parameters())[name]
        assert torch.equal(now, as_delivered(name, before[name], bases[name], 0.1))
        assert not torch.equal(now, before[name])
        raise RuntimeError("stop")
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored(model))


def test_a_delta_is_small(tmp_path: Path):
    model, dense, plans = repaired()
    save_delta(tmp_path / "d", model, dense, plans, GEOMETRY, 0.14, {})
    weights = sum(tensor.numel() for name, tensor in stored(model) if kind_of(name) == "ternary")
    tensors = load_file(tmp_path / "d")
    bits = 8 * sum(t.numel() for n, t in tensors.items() if n.endswith(".codes") and kind_of(n[:-6]) == "ternary")
    assert bits / weights < 0.9  # the entropy of the digits is 0.72 bits; small tensors add code tables


@pytest.mark.parametrize("case", ["geometry", "dense", "truncated", "foreign", "damaged"])
def test_a_delta_that_does_not_fit_is_refused(tmp_path: Path, case: str):
    model, dense, plans = repaired()
    file, geometry = tmp_path / "d", GEOMETRY
    save_delta(file, model, dense, plans, geometry, 0.2, {})
    if case == "geometry":
        geometry = Geometry(32, 8, 2, 16)
    elif case == "dense":
        dense.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1.0
    elif case == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif case == "foreign":
        save_file({"x": torch.zeros(1)}, file)
    else:
        with safe_open(file, "pt") as saved:
            header = saved.metadata()
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith(".codes"))
        tensors[name] = tensors[name][:-5]
        save_file(tensors, file, metadata=header)
    message = {
        "geometry": "another geometry.*top_k: 3",
        "dense": "another dense model",
        "truncated": "cannot be read",
        "foreign": "not a delta",
        "damaged": "damaged at model",
    }[case]
    with pytest.raises(MoexpError, match=message):
        apply_delta(file, dense, geometry)


def test_an_unknown_delta_is_an_error_that_names_those_there_are():
    with pytest.raises(MoexpError, match="no delta 'nope'.*a file, or one of"):
        find_delta("nope")


def test_the_details_are_json(tmp_path: Path):
    model, dense, plans = repaired()
    save_delta(tmp_path / "d", model, dense, plans, GEOMETRY, 0.2, {"a": [1, 2]})
    with safe_open(tmp_path / "d", "pt") as saved:
        assert json.loads(saved.metadata()["details"]) == {"a": [1, 2]}


def test_the_shipped_delta_is_small_and_fits_the_recipe_that_uses_it():
    from moexp.config.recipe import load_recipe

    section = load_recipe("pocket").target
    assert section.delta is not None
    file = find_delta(section.delta)
    assert file.stat().st_size <= 12_000_000
    with safe_open(file, "pt") as saved:
        header = saved.metadata()
        shape = saved.get_slice("plan.own_En").get_shape()
    geometry = json.loads(header["geometry"])
    for name in ("shared_neurons", "routed_experts", "top_k", "expert_width"):
        assert geometry[name] == getattr(section.carve, name)
    assert shape == [29, section.carve.routed_experts, (1536 - section.carve.shared_neurons) // 64]
