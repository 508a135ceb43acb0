"""The expert index: places agree with what safetensors itself reads; damaged checkpoints are refused by name."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from moexp.base.errors import MoexpError
from moexp.target.experts import PARTS, ExpertIndex
from moexp.target.families import FAMILIES
from moexp.target.shards import checkpoint_files, read_header
from tests.expert_files import APART, NAMES, expert_tensors, save_in_order, save_shards


def bytes_at(index: ExpertIndex, key, part) -> bytes:
    at = index.locations[key]
    span = at.ranges[part.range]
    with index.files[span.file].open("rb") as stream:
        stream.seek(span.start + part.offset)
        return stream.read(part.nbytes)


def assert_places(index: ExpertIndex, names=NAMES) -> None:
    """Bytes at the indexed places are those that safetensors gives for the names."""
    loaded = {name: tensor for file in index.files for name, tensor in load_file(file).items()}
    for layer, expert in index.keys:
        at = index.locations[layer, expert]
        for part in PARTS:
            tensor = loaded[names[part].format(layer=layer, expert=expert)]
            assert bytes_at(index, (layer, expert), at.parts[part]) == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shards", [1, 3])
def test_places(tmp_path, dtype, shards):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, expert_tensors(dtype=dtype), shards))
    assert index.keys == tuple((layer, expert) for layer in (1, 2) for expert in range(4))
    assert index.dtype == dtype
    assert index.expert_bytes == 3 * 24 * 40 * dtype.itemsize
    assert len(index.files) == shards
    assert_places(index)


def test_an_expert_lies_in_one_range(tmp_path):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, expert_tensors()))
    for at in index.locations.values():
        assert len(at.ranges) == 1 and at.ranges[0].length == index.expert_bytes
        assert [at.parts[part].offset for part in ("down", "gate", "up")] == [0, 3840, 7680]


def test_experts_cut_by_shards_and_scattered_tensors(tmp_path):
    tensors = expert_tensors(names=APART)
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors, 4, lambda number: number % 4), APART)
    assert all(len(at.ranges) == 3 for at in index.locations.values())
    assert_places(index, APART)


def test_more_than_ten_layers_and_experts(tmp_path):
    """Names sort as text (10 before 2); keys are numbers."""
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, expert_tensors(layers=11, experts=12, width=2, hidden=3)))
    assert index.keys == tuple((layer, expert) for layer in range(1, 12) for expert in range(12))
    assert_places(index)


def test_tensor_names_are_the_routed_experts(tmp_path):
    tensors = expert_tensors()
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))
    others = set(tensors) - index.tensor_names
    assert len(index.tensor_names) == 2 * 4 * 3
    assert not any(".experts." in name for name in others) and "model.layers.1.mlp.gate.weight" in others


@pytest.mark.parametrize("cut", [1, 700, 10**9])
def test_truncated_shard_is_named(tmp_path, cut):
    save_shards(tmp_path, expert_tensors(), 3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: max(0, len(data) - cut)])
    with pytest.raises(MoexpError, match="model-00002-of-00003"):
        ExpertIndex.from_checkpoint(tmp_path)


def test_shard_that_is_too_long_is_named(tmp_path):
    save_shards(tmp_path, expert_tensors())
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(MoexpError, match="model.safetensors has"):
        ExpertIndex.from_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path):
    save_shards(tmp_path, expert_tensors(), 3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(MoexpError, match="model-00003-of-00003.safetensors is missing"):
        ExpertIndex.from_checkpoint(tmp_path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(MoexpError, match="model.safetensors is missing"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_unreadable_shard_index(tmp_path, index):
    save_shards(tmp_path, expert_tensors())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(MoexpError, match="unreadable shard index"):
        ExpertIndex.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", b"not a checkpoint at all", struct.pack("<Q", 4) + b"oops", struct.pack("<Q", 2) + b"[]"],
)
def test_no_safetensors_file(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(MoexpError, match="model.safetensors"):
        read_header(file)


def test_incomplete_expert_is_named(tmp_path):
    tensors = expert_tensors()
    del tensors[NAMES["up"].format(layer=2, expert=1)]
    with pytest.raises(MoexpError, match=r"layers\.2\.mlp\.experts\.1\.up_proj\.weight is missing"):
        ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))


def test_wrong_shapes_are_refused(tmp_path):
    tensors = expert_tensors()
    name = NAMES["down"].format(layer=1, expert=3)
    tensors[name] = tensors[name].t().contiguous()
    with pytest.raises(MoexpError, match="layer 1, expert 3: shapes"):
        ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))


def test_mixed_or_unknown_types_are_refused(tmp_path):
    tensors = expert_tensors()
    name = NAMES["gate"].format(layer=1, expert=0)
    mixed = tensors | {name: tensors[name].half()}
    with pytest.raises(MoexpError, match="stored as F16, F32"):
        ExpertIndex.from_checkpoint(save_shards(tmp_path / "mixed", mixed))
    bytes_only = {name: tensor.to(torch.uint8) for name, tensor in tensors.items()}
    with pytest.raises(MoexpError, match="stored as U8.*valid: one of BF16"):
        ExpertIndex.from_checkpoint(save_in_order(tmp_path / "bytes", bytes_only))


def test_no_expert_in_the_checkpoint(tmp_path):
    with pytest.raises(MoexpError, match="no routed expert"):
        ExpertIndex.from_checkpoint(save_shards(tmp_path, {"lm_head.weight": torch.zeros(2, 2)}))


def test_unsupported_model_type_lists_the_supported(tmp_path):
    save_shards(tmp_path, expert_tensors())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(MoexpError, match="mamba.*glm4_moe") as error:
        ExpertIndex.from_checkpoint(tmp_path)
    assert all(name in str(error.value) for name in FAMILIES)
    (tmp_path / "config.json").unlink()
    with pytest.raises(MoexpError, match=r"no readable config\.json"):
        ExpertIndex.from_checkpoint(tmp_path)
