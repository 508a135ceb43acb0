"""The comparison with peers: what is written for them, what each engine answers, and the table."""

from __future__ import annotations

import importlib.util
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants

from moexp.base.errors import MoexpError
from moexp.bench.peers import run as peers
from moexp.bench.peers.engines import ENGINES, answer, forget
from moexp.bench.peers.gguf import expert_ranges, write_gguf
from moexp.runtime.store.host import load_experts
from moexp.tables import peers as tables
from moexp.target.load import load_target
from tests.tiny_models import tiny_folder, whole_model

CHANGES = {"use_qk_norm": False, "attention_bias": False}
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("peers") / "target", changes=CHANGES)


@pytest.fixture(scope="module")
def greedy(target: Path) -> list[int]:
    model, ids = whole_model(target), list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_a_gguf_file_holds_the_checkpoints_weights(target: Path, tmp_path: Path):
    file = tmp_path / "target.gguf"
    write_gguf(target, file)
    stored = {}
    for tensor in GGUFReader(file).tensors:
        values = quants.dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        stored[tensor.name] = torch.from_numpy(np.array(values)).float()
    loaded = load_target(target, dtype=torch.bfloat16)
    experts, spec = load_experts(loaded.index, torch.bfloat16), loaded.spec
    for layer in spec.moe_layers:
        for expert in range(spec.num_experts):
            gate, up = experts[layer, expert].gate_up.float().chunk(2)
            assert torch.equal(stored[f"blk.{layer}.ffn_gate_exps.weight"][expert], gate)
            assert torch.equal(stored[f"blk.{layer}.ffn_up_exps.weight"][expert], up)
            assert torch.equal(stored[f"blk.{layer}.ffn_down_exps.weight"][expert], experts[layer, expert].down.float())
    state = loaded.model.state_dict()
    assert torch.equal(stored["token_embd.weight"], state["model.embed_tokens.weight"].float())
    assert torch.equal(stored["blk.0.attn_q.weight"], state["model.layers.0.self_attn.q_proj.weight"].float())
    mine = [name for name in state if ".experts." not in name and not state[name].is_meta]
    assert len(stored) == len(mine) + 3 * len(spec.moe_layers)
    spans, size = expert_ranges(file), sum(weights.nbytes for weights in experts.values())
    assert len(spans) == 3 * len(spec.moe_layers) and sum(end - begin for begin, end in spans) == size


def test_only_carved_targets_are_written(tmp_path: Path):
    other = tiny_folder(tmp_path / "other", model_type="qwen3_moe")
    with pytest.raises(MoexpError, match="family qwen3_moe"):
        write_gguf(other, tmp_path / "other.gguf")
    assert not list(tmp_path.glob("*.gguf"))


def options_of(name: str, target: Path, folder: Path) -> dict[str, Any]:
    if name == "llama.cpp":
        write_gguf(target, folder / "target.gguf")
        return {"model": str(folder / "target.gguf"), "threads": 1}
    if name == "accelerate":
        return {"model": str(target), "threads": 1, "offload": str(folder / "offloaded")}
    return {"model": str(target), "threads": 1, "io_threads": 2}


@pytest.mark.e2e
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_decodes_what_transformers_does(name: str, target: Path, greedy: list[int], tmp_path: Path):
    for peer, module in (("accelerate", "accelerate"), ("llama.cpp", "llama_cpp")):
        if name == peer and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    engine = ENGINES[name](**options_of(name, target, tmp_path))
    for _ in range(2):  # a request leaves nothing to the next
        found = answer(engine, PROMPT, 6)
        assert len(found["seconds"]) == len(found["read_bytes"]) == 6 and min(found["seconds"]) > 0
        assert found["ids"] == greedy if name != "llama.cpp" else found["ids"][:2] == greedy[:2]


def test_forgotten_pages_come_back_as_they_were(tmp_path: Path):
    file, data = tmp_path / "file", bytes(range(256)) * 64
    file.write_bytes(data)
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert view[:] == data
        forget(file, [(100, 9000)])
        forget(file)
        assert view[:] == data


def raw() -> dict[str, Any]:
    def of(seconds: list[float], ids: list[int], read: int) -> dict[str, Any]:
        return {"seconds": seconds, "ids": ids, "read_bytes": [read] * len(ids)}

    return {
        "target": "t",
        "engines": {
            "moexp": [of([0.1, 0.1], [1, 2], 50), of([0.2, 0.2], [3, 4], 50)],
            "accelerate": [of([1.0, 1.0], [1, 2], 500), of([4.0, 4.0], [3, 9], 500)],
        },
        "versions": {"moexp": "moexp 1", "accelerate": "accelerate 2"},
        "needed_bytes": 48, "expert_bytes": 8, "experts_per_token": 6, "threads": 2, "io_threads": 8,
    }  # fmt: skip


def test_ratios_are_of_the_same_prompt_and_tokens_are_compared_by_id():
    ours, theirs = (tables.row_of(raw(), engine) for engine in ("moexp", "accelerate"))
    assert (ours["tokens_per_s"], ours["moexp_ratio"], ours["same_tokens"]) == (pytest.approx(7.5), 1.0, 1.0)
    assert (theirs["moexp_ratio_lo"], theirs["moexp_ratio_hi"]) == (pytest.approx(10), pytest.approx(20))
    assert theirs["moexp_ratio"] == pytest.approx(15) and theirs["same_tokens"] == 0.75
    assert (theirs["bytes_per_token"], theirs["token_ms"]) == (500, pytest.approx(2500))
    shown = tables.markdown(raw(), [ours, theirs], {"command": "c"})
    assert "15.00x" in shown and "10x" in shown and "measured" in shown


@pytest.mark.e2e
def test_engines_take_turns_and_the_table_is_written(target: Path, tmp_path: Path):
    plan = peers.PeerRun(
        target, [PROMPT, PROMPT[::-1]], tmp_path / "work",
        engines=["moexp"], tokens=3, threads=1, io_threads=2, name="tiny",
    )  # fmt: skip
    found = peers.run(plan, tmp_path / "results")
    assert [len(one["ids"]) for one in found["engines"]["moexp"]] == [3, 3]
    assert (tmp_path / "results" / "peers.csv").read_text().count("\n") == 2
    kept = json.loads((tmp_path / "results" / "peers.json").read_text())
    assert kept["needed_bytes"] == kept["expert_bytes"] * kept["experts_per_token"] and kept["provenance"]["command"]


def test_an_engine_that_ends_is_one_error(tmp_path: Path):
    with pytest.raises(MoexpError, match="moexp ended with code 1"):
        peers.Worker("moexp", peers.sys.executable, {"model": str(tmp_path), "threads": 1, "io_threads": 1})
