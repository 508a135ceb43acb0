from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Engine
from moexp.runtime.store.opening import open_store
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target import pad
from moexp.target.experts import ExpertIndex
from moexp.target.load import checkpoint_fingerprint, load_target, target_identity
from moexp.target.pad import pad_experts
from tests.tiny_models import random_rows, tiny_folder, whole_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("pad") / "source")


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return whole_model(folder)(input_ids=random_rows(2, 20).long()).logits


@pytest.mark.parametrize("shard_bytes", [1 << 29, 20_000], ids=["one shard", "many shards"])
def test_a_padded_target_computes_the_same_with_more_bytes_an_expert(
    folder: Path, tmp_path: Path, monkeypatch, shard_bytes
):
    monkeypatch.setattr(pad, "SHARD_BYTES", shard_bytes)
    pad_experts(folder, tmp_path / "padded", 48)
    assert torch.allclose(logits(tmp_path / "padded"), logits(folder), atol=1e-5)
    plain, padded = ExpertIndex.from_checkpoint(folder), ExpertIndex.from_checkpoint(tmp_path / "padded")
    assert padded.expert_bytes == 3 * plain.expert_bytes and padded.keys == plain.keys
    shards = len(list((tmp_path / "padded").glob("*.safetensors")))
    assert shards == 1 if shard_bytes > 1 << 20 else shards > 2
    # One read brings a whole expert: no expert is cut by a shard, none is scattered within one.
    assert all(len(place.ranges) == 1 for place in padded.locations.values())


@pytest.mark.parametrize(("shared", "width", "count"), [(1, 48, 1), (4, 48, 2), (0, 24, 0)])
def test_shared_experts_are_padded_to_whole_ones(tmp_path: Path, shared: int, width: int, count: int):
    family = "glm4_moe" if shared else "qwen3_moe"
    source = tiny_folder(tmp_path / "source", shared=shared, model_type=family)
    pad_experts(source, tmp_path / "padded", width)
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["n_shared_experts"] == count
    assert torch.allclose(logits(tmp_path / "padded"), logits(source), atol=1e-5)


def test_a_padded_target_is_the_same_function_under_another_fingerprint(folder: Path, tmp_path: Path):
    pad_experts(folder, tmp_path / "padded", 32)
    assert target_identity(tmp_path / "padded") == target_identity(folder) == checkpoint_fingerprint(folder)
    assert checkpoint_fingerprint(tmp_path / "padded") != checkpoint_fingerprint(folder)


def test_a_padded_target_decodes_the_same_tokens(folder: Path, tmp_path: Path):
    pad_experts(folder, tmp_path / "padded", 32)
    tokens = []
    for place in (folder, tmp_path / "padded"):
        target = load_target(place, dtype=torch.float32)
        with open_store(target.index, "host") as store:
            engine = Engine(target, store)
            _, request = decode_all(engine, [5, 6, 7], Method(), Sampling(), max_new_tokens=12)
        tokens.append(request.tokens)
        assert target.tokenizer.chat_template
    assert tokens[0] == tokens[1]


def test_experts_are_never_made_narrower(folder: Path, tmp_path: Path):
    with pytest.raises(MoexpError, match="cannot pad experts of width 16 to 8.*valid: >= 16"):
        pad_experts(folder, tmp_path / "padded", 8)
    assert not (tmp_path / "padded").exists()
