"""A target larger than memory, decoded from disk: the benchmark's own code, at a tiny shape and at full size."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moexp.base.errors import MoexpError
from moexp.bench.scale import run as scale
from moexp.bench.scale.checkpoint import V2_LITE, checkpoint_bytes, write_checkpoint
from moexp.runtime.engine.engine import AR, Block, Engine
from moexp.runtime.store.opening import open_store
from moexp.tables.scale import GOAL_RSS_GIB, GOAL_SHARE
from moexp.target.experts import ExpertIndex
from moexp.target.load import load_target

FULL_NEEDS = 35_000_000_000


def test_the_full_shape_is_that_of_deepseek_v2_lite():
    assert checkpoint_bytes(V2_LITE) == 2 * 15_706_484_224  # the published model's parameters
    assert checkpoint_bytes(V2_LITE) < FULL_NEEDS


def test_the_checkpoint_is_one_that_transformers_reads(tmp_path: Path):
    write_checkpoint(tmp_path / "a", scale.TINY, shard_bytes=200_000)
    write_checkpoint(tmp_path / "b", scale.TINY, shard_bytes=200_000)
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.read_bytes() == (tmp_path / "b" / shard.name).read_bytes() for shard in shards)
    index = ExpertIndex.from_checkpoint(tmp_path / "a")
    assert all(len(at.ranges) == 1 for at in index.locations.values())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    target = load_target(tmp_path / "a", dtype=torch.float32)
    with open_store(index, "resident", dtype=torch.float32) as store:
        engine = Engine(target, store)
        engine.start(8)
        ours = engine.run(Block(scale.PROMPT), AR).logits_BV
    with torch.no_grad():
        theirs = model.eval()(input_ids=torch.tensor([scale.PROMPT])).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert len(set(ours.argmax(-1).tolist())) > 2  # it wanders


def check(found: dict, results: Path) -> None:
    (ar, spec) = csv.DictReader((results / "scale.csv").open())
    assert (ar["method"], spec["method"]) == ("ar", "top-1")
    assert ar["bit_exact"] == spec["bit_exact"] == "yes"
    # Cold: every expert that a step needs is read, once, in whole pages.
    demanded, moved = found["methods"]["ar"]["demanded"], found["methods"]["ar"]["read_bytes"]
    assert demanded == found["methods"]["ar"]["tokens"] * found["experts_per_token"]
    assert demanded * found["expert_bytes"] <= moved <= demanded * (found["expert_bytes"] + 4 * 4096)
    assert "commit" in (results / "scale.md").read_text()


@pytest.mark.e2e
def test_a_tiny_one_is_decoded_and_reported(tmp_path: Path, capsys):
    places = ["--folder", str(tmp_path / "scale"), "--results", str(tmp_path / "results")]
    arguments = [*places, "--tiny", "--threads", "1"]
    assert scale.main([*arguments, "--tokens", "6"]) == 0
    assert not (tmp_path / "scale").exists()
    text = capsys.readouterr().out
    assert "Peak memory" in text and "python -m moexp.bench.scale.run" in text
    check(json.loads((tmp_path / "results" / "scale.json").read_text()), tmp_path / "results")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path):
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(MoexpError, match="something else is there"):
        scale.run(tmp_path, tmp_path / "results", geometry=scale.TINY)
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def test_a_disk_without_room_is_one_error(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(scale.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 0, 10**10))
    with pytest.raises(MoexpError, match="31.4 GB, and 10.0 GB are free"):
        scale.run(tmp_path / "scale", tmp_path / "results", geometry=V2_LITE)
    assert not (tmp_path / "scale").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_full_size_fits_memory_and_keeps_up_with_the_disk(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    if free < FULL_NEEDS:
        pytest.skip(f"needs {FULL_NEEDS / 1e9:.0f} GB of disk, {free / 1e9:.1f} GB are free")
    found = scale.run(tmp_path / "scale", tmp_path / "results", geometry=V2_LITE, tokens=8)
    check(found, tmp_path / "results")
    (ar, _) = csv.DictReader((tmp_path / "results" / "scale.csv").open())
    assert float(ar["peak_rss_gib"]) <= GOAL_RSS_GIB
    assert float(ar["share_of_bound"]) >= GOAL_SHARE
