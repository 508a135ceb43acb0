"""MTP heads: the equations, the layer inside a DeepSeek-V3-style checkpoint, and every one that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from moexp.base.errors import MoexpError
from moexp.target.heads.head import HeadCache
from moexp.target.heads.mtp_files import HEADER, WEIGHTS, is_dense, load_mtp_head, load_mtp_layer, save_mtp_head
from moexp.target.heads.mtp_head import MtpHead, new_mtp_head, start_from_target
from moexp.target.load import load_target
from tests.heads import deepseek_with_mtp, write_mtp
from tests.tiny_models import tiny_folder, whole_model

TARGET = "a" * 64


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_with_mtp(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("glm"))


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def mtp_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model-mtp.safetensors")


def pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 90, (1, count), generator=generator), torch.randn(1, count, 32, generator=generator)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_the_layer_in_the_shards_is_the_target_s_own_layer_behind_the_projection(deepseek: Path):
    """Its decoder layer was written with the last layer's weights, so transformers' own module is the reference."""
    model = whole_model(deepseek)
    head = load_mtp_layer(deepseek, model, dtype=torch.float32)
    assert not is_dense(head) and not any(parameter.requires_grad for parameter in head.parameters())
    tensors = {name.removeprefix("model.layers.2."): tensor for name, tensor in mtp_tensors(deepseek).items()}
    ids, hidden = pairs(7)
    made = head(ids, hidden, torch.arange(7)[None])

    embedded = model.model.embed_tokens(ids)
    both = torch.cat([norm(embedded, tensors["enorm.weight"]), norm(hidden, tensors["hnorm.weight"])], -1)
    x = both @ tensors["eh_proj.weight"].T
    positions = model.model.rotary_emb(x, torch.arange(7)[None])
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    wanted = model.model.layers[1](x, attention_mask=mask, position_embeddings=positions)
    wanted = norm(wanted, tensors["shared_head.norm.weight"])
    assert torch.allclose(made, wanted, atol=1e-5)
    assert torch.allclose(head.logits(made), F.linear(wanted, model.lm_head.weight), atol=1e-4)
    assert head.shared.lm_head is model.lm_head and head.vocab == 256


def test_the_checkpoint_still_loads_as_a_target_and_the_head_attaches_to_it(deepseek: Path):
    target = load_target(deepseek)
    head = load_mtp_layer(deepseek, target.model, dtype=torch.float32)
    ids, hidden = pairs(3)
    assert head.logits(head(ids, hidden, torch.arange(3)[None])).isfinite().all()
    low = load_mtp_layer(deepseek, target.model)
    layer: Any = low.layer
    assert low.eh_proj.weight.dtype == torch.bfloat16 and layer.mlp.gate.weight.dtype == torch.float32
    assert low(ids, hidden.bfloat16(), torch.arange(3)[None]).isfinite().all()


def test_only_the_shards_that_hold_the_layer_are_opened(deepseek: Path, tmp_path: Path):
    model = whole_model(deepseek)
    folder = copied(deepseek, tmp_path / "copy")
    for file in folder.glob("model-0*.safetensors"):
        file.write_bytes(b"not to be read")
    assert isinstance(load_mtp_layer(folder, model), MtpHead)


@pytest.mark.parametrize("kind", ["mla with experts", "dense"])
def test_steps_and_trees_through_the_cache_are_their_paths_alone(kind: str, deepseek: Path, glm: Path):
    if kind == "dense":
        head = new_mtp_head(whole_model(glm), seed=1)
        assert is_dense(head)
    else:
        head = load_mtp_layer(deepseek, whole_model(deepseek), dtype=torch.float32)
    head.requires_grad_(False)
    ids, hidden = pairs(9)
    whole = head(ids, hidden, torch.arange(9)[None])
    cache = HeadCache(capacity=4)
    first = head(ids[:, :6], hidden[:, :6], torch.arange(6)[None], None, cache)
    rest = head(ids[:, 6:], hidden[:, 6:], torch.arange(6, 9)[None], None, cache)
    assert torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-5)

    cache.rollback(6)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:, 6:] = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]])  # two children of the root, one grandchild
    tree = head(ids[:, 6:], hidden[:, 6:], torch.tensor([[6, 6, 7]]), mask, cache)
    for node, path in enumerate(([6], [7], [7, 8])):
        chosen = [*range(6), *path]
        alone = head(ids[:, chosen], hidden[:, chosen], torch.arange(len(chosen))[None])
        assert torch.allclose(tree[0, node], alone[0, -1], atol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_a_head_trained_here_is_saved_with_its_target(dense: bool, glm: Path, tmp_path: Path):
    model = whole_model(glm)
    head = new_mtp_head(model, dense=dense, seed=3)
    assert head.features(torch.ones(1, 1, 32)).equal(torch.ones(1, 1, 32))
    save_mtp_head(tmp_path / "head", head, TARGET, {"metrics": {"kl": 0.5}})
    again = load_mtp_head(tmp_path / "head", model, TARGET, dtype=torch.float32)
    assert is_dense(again) == dense
    assert json.loads((tmp_path / "head" / HEADER).read_text())["metrics"] == {"kl": 0.5}
    ids, hidden = pairs(4)
    at = torch.arange(4)[None]
    assert torch.equal(head(ids, hidden, at), again(ids, hidden, at))
    with pytest.raises(MoexpError, match="an MTP head of target aaaaaaaaaaaa, but the target is bbbbbbbbbbbb"):
        load_mtp_head(tmp_path / "head", model, "b" * 64)


def test_damage_of_a_head_trained_here_is_one_error(glm: Path, tmp_path: Path):
    model = whole_model(glm)
    folder = tmp_path / "head"
    with pytest.raises(MoexpError, match="no readable mtp_head.json"):
        load_mtp_head(folder, model, TARGET)
    save_mtp_head(folder, new_mtp_head(model), TARGET)
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | {"dense": False}))
    with pytest.raises(MoexpError, match=r"tensor layer.mlp.experts.down_proj and \d more missing"):
        load_mtp_head(folder, model, TARGET)
    (folder / HEADER).write_text(json.dumps(header | {"format": "other"}))
    with pytest.raises(MoexpError, match="unknown format 'other'"):
        load_mtp_head(folder, model, TARGET)
    (folder / HEADER).write_text(json.dumps(header))
    (folder / WEIGHTS).write_bytes(b"short")
    with pytest.raises(MoexpError, match="damaged weights"):
        load_mtp_head(folder, model, TARGET)


def test_a_head_that_starts_from_its_target_repeats_the_target_s_state(glm: Path):
    model = whole_model(glm)
    head = new_mtp_head(model)
    start_from_target(head, model.model.norm)
    cache = DynamicCache(config=model.config)
    final = model.model(input_ids=torch.arange(5)[None], cache=cache).last_hidden_state
    states = head(torch.arange(1, 6)[None], head.features(final), torch.arange(5)[None])
    assert torch.allclose(states, norm(final, model.model.norm.weight), atol=1e-4)


# --- checkpoints that must be refused ---


def test_a_checkpoint_without_the_layer_is_refused(deepseek: Path, tmp_path: Path):
    model = whole_model(deepseek)
    folder = copied(deepseek, tmp_path / "copy")
    write_mtp(folder, {"model.layers.9.enorm.weight": torch.ones(32)})
    with pytest.raises(MoexpError, match=r"promises 1 MTP layers, but there is no tensor model.layers.2.\*"):
        load_mtp_layer(folder, model)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    for none in ({"num_nextn_predict_layers": 0}, {}):
        kept = {key: value for key, value in config.items() if key != "num_nextn_predict_layers"} | none
        (folder / "config.json").write_text(json.dumps(kept))
        with pytest.raises(MoexpError, match="no MTP layer in a checkpoint with num_nextn_predict_layers 0"):
            load_mtp_layer(folder, model)


CHANGED = {
    "a missing projection": ("eh_proj.weight", None, "tensor eh_proj.weight missing"),
    "a missing norm": ("shared_head.norm.weight", None, "tensor shared_head.norm.weight missing"),
    "a missing expert": ("mlp.experts.3.up_proj.weight", None, "tensor layer.mlp.experts.3.up_proj.weight missing"),
    "an expert too many": (
        "mlp.experts.4.up_proj.weight",
        torch.ones(16, 32),
        "tensor layer.mlp.experts.4.up_proj.weight not expected",
    ),
    "another width": ("enorm.weight", torch.ones(48), r"enorm.weight has shape \[48\]"),
    "fp8": (
        "eh_proj.weight",
        torch.ones(32, 64).to(torch.float8_e4m3fn),
        "eh_proj.weight is stored as F8_E4M3",
    ),
}


@pytest.mark.parametrize("which", CHANGED)
def test_a_layer_that_does_not_fit_is_refused(which: str, deepseek: Path, tmp_path: Path):
    name, tensor, message = CHANGED[which]
    folder = copied(deepseek, tmp_path / "copy")
    tensors = mtp_tensors(folder)
    tensors.pop(f"model.layers.2.{name}", None)
    if tensor is not None:
        tensors[f"model.layers.2.{name}"] = tensor
    write_mtp(folder, tensors)
    with pytest.raises(MoexpError, match=message):
        load_mtp_layer(folder, whole_model(deepseek))


def test_an_index_that_lies_is_refused(deepseek: Path, tmp_path: Path):
    folder = copied(deepseek, tmp_path / "copy")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.2.extra"] = "model-mtp.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MoexpError, match="tensor model.layers.2.extra is missing from model-mtp.safetensors"):
        load_mtp_layer(folder, whole_model(deepseek))
