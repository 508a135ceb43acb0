"""`moexp plan`: sizes against checkpoints and stores, speeds against the papers and the platforms, and its text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from typer.testing import CliRunner

from moexp import metrics
from moexp.base.errors import MoexpError
from moexp.base.yamlio import dump_yaml
from moexp.cli import main as cli
from moexp.config.recipe import Recipe, load_recipe
from moexp.papers import load_paper
from moexp.plan import run_plan
from moexp.plan.memory import decoding_parts, disk_parts, draft_params, kept_experts, sizes_of, training_bytes
from moexp.plan.shape import folder_shape, shape_of
from moexp.plan.speed import Speed, speeds_of
from moexp.plan.text import amount, duration
from moexp.runtime.opening import opened_engine
from moexp.sim.platforms.files import load_platform, machine_file
from moexp.sim.platforms.geometry import PUBLISHED_MODELS, find_geometry
from moexp.target.draft_expert import DraftExperts
from moexp.target.families import FAMILIES
from moexp.target.load import load_target

REPO = Path(__file__).parent.parent
DS = "DeepSeek-V2-Lite"
HUB_RECIPES = {
    "ds-v2-lite": DS, "moonlight-16b-a3b": "Moonlight-16B-A3B", "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "gpt-oss-120b": "GPT-OSS-120B", "deepseek-v3.1": "DeepSeek-V3.1", "olmoe-1b-7b": "OLMoE-1B-7B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "GPT-OSS-20B", "mixtral-8x7b": "Mixtral-8x7B",
}  # fmt: skip


def moexp_(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def speeds(recipe: Recipe, platform: str | None = None) -> list[Speed]:
    shape = shape_of(recipe)
    return speeds_of(shape.geometry, recipe.name, sizes_of(shape, recipe).moved, platform)


def rate(speed: Speed, what: str) -> Any:
    (found,) = [rate for rate in speed.rates if rate.what == what]
    return found


# --- the text ---


@pytest.mark.parametrize("name", HUB_RECIPES)
def test_every_recipe_of_a_checkpoint_has_a_plan_of_80_columns(name: str):
    result = moexp_("--recipe", name)
    assert result.exit_code == 0, result.stderr
    assert shape_of(load_recipe(name)).geometry.name == HUB_RECIPES[name]
    assert max(map(len, result.stdout.splitlines())) <= 80
    for section in ("Sizes", "Memory to decode", "Disk", "Speed on ", "Time"):
        assert f"\n\n{section}" in result.stdout


def test_a_plan_fetches_nothing_and_imports_no_torch():
    run = "import sys; from moexp.cli.main import app; app(['plan'], standalone_mode=False)"
    script = f"{run}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_guides_figures_are_the_commands():
    guide = (REPO / "recipes" / "ds-v2-lite.md").read_text()
    begin, end = "<!-- moexp plan -->\n```\n", "```\n<!-- end of plan -->"
    assert guide.count(begin) == guide.count(end) == 1
    assert guide.partition(begin)[2].partition(end)[0] == run_plan(load_recipe("ds-v2-lite"))


def test_amounts_have_the_unit_that_suits_them():
    assert [amount(size) for size in (24_576, 17.3e6, 449.8e6, 28.79e9, 470.2e9, 1342.1e9)] == [
        "24.58 kB", "17.30 MB", "449.8 MB", "28.79 GB", "470.2 GB", "1,342 GB",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (58.44, 119, 251, 9000)] == ["58.4 s", "119.0 s", "4.2 min", "2.5 h"]


# --- sizes ---


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_sizes_are_those_of_a_checkpoint_and_of_what_decoding_holds(tiny_folder: Any, model_type: str):
    folder = tiny_folder(model_type=model_type)
    shape, recipe = folder_shape(folder, "tiny"), load_recipe("tiny", ["draft.width=8"])
    sizes, geometry = sizes_of(shape, recipe), shape.geometry
    assert shape.checkpoint_bytes == (folder / "model.safetensors").stat().st_size and shape.counted
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert geometry.checkpoint_params == pytest.approx(stored, rel=0.03)  # norms are left out
    target = load_target(folder, dtype=torch.float32)
    assert sizes.stored == sizes.held == sizes.moved == target.index.expert_bytes * 4 // target.index.dtype.itemsize
    assert sizes.slot == sizes.stored * (2 if geometry.expert_bias_params else 1)
    assert geometry.layer_experts == len(target.index.keys)
    held = sum(tensor.nbytes for tensor in target.model.state_dict().values() if not tensor.is_meta)
    assert sizes.loaded == pytest.approx(held, rel=0.05)
    drafts = DraftExperts(geometry.hidden, recipe.draft.width, target.spec.moe_layers)
    scales = geometry.moe_layers * 4
    assert sizes.draft == 4 * draft_params(shape, recipe) == sum(each.nbytes for each in drafts.parameters()) - scales
    with opened_engine(target, recipe.store) as engine:
        engine.start(1000)
        engine.prefill([5, 6, 7])
        layers: list[Any] = engine.cache.layers
        capacity = layers[0][0].shape[2]
        cached = sum(keys.nbytes + values.nbytes for keys, values in layers)
    assert sizes.kv == geometry.kv_bytes(1000, 4)
    assert geometry.kv_bytes(capacity, 4) == cached


def test_memory_of_deepseek_v2_lite_by_store():
    def parts(*changes: str) -> dict[tuple[str, str], int]:
        recipe = load_recipe("ds-v2-lite", list(changes))
        return {(part.what, part.place): part.size for part in decoding_parts(shape_of(recipe), recipe)}

    expert, pool = 3 * 2048 * 1408 * 2, 26 * 64 * 3 * 2048 * 1408 * 2
    host = parts()
    assert host["routed experts", "host"] == pool
    assert host["slots for routed experts", "GPU"] == 26 * 5 * 6 * expert  # five tokens choose 30 of 64 at most
    assert host["draft experts", "GPU"] == 26 * expert
    assert parts("decode.max_draft=15")["slots for routed experts", "GPU"] == pool  # 96 choices of 64
    assert parts("decode.drafter=ar")["slots for routed experts", "GPU"] == 26 * 6 * expert
    recipe = load_recipe("ds-v2-lite", ["decode.drafter=ar"])
    shape = shape_of(recipe)
    shallow = replace(shape, geometry=replace(shape.geometry, layers=2, moe_layers=1))
    assert decoding_parts(shallow, recipe)[-1].size == 64 * expert  # the experts of a prompt's rows in one layer
    assert ("draft experts", "GPU") not in parts("decode.drafter=top-r")
    disk = parts("store.kind=disk")
    assert disk["packed copies", "host"] == 2 * PUBLISHED_MODELS[DS].resident_params + 26 * expert
    assert ("packed copies", "host") not in parts("device=cpu", "target.dtype=float32")
    assert all(place == "host" for _, place in disk) and ("routed experts", "host") not in disk
    resident = parts("store.kind=resident")
    assert resident["routed experts", "GPU"] == pool and ("slots for routed experts", "GPU") not in resident
    assert all(place == "host" for _, place in parts("device=cpu"))
    budget = parts("store.policy=lru", "store.budget_mib=2_000")
    assert budget["slots for routed experts", "GPU"] == 2000 * 2**20 // expert * expert
    assert parts("store.policy=lru")["slots for routed experts", "GPU"] == pool


def test_quantised_experts_are_held_decoded_and_cross_a_disk_as_stored():
    recipe = load_recipe("gpt-oss-20b")
    shape = shape_of(recipe)
    host, disk = sizes_of(shape, recipe), sizes_of(shape, load_recipe("gpt-oss-20b", ["store.kind=disk"]))
    assert host.held == host.moved == host.slot == (3 * 2880 * 2880 + 3 * 2880) * 2
    assert (disk.stored, disk.moved) == (find_geometry("GPT-OSS-20B").expert_bytes(),) * 2
    assert disk.slot == disk.held + disk.stored  # read beside what it is decoded to
    assert kept_experts(shape, recipe) == 8192 * 2**20 // host.held


def test_disk_and_training_hold_the_whole_target():
    recipe = load_recipe("ds-v2-lite")
    shape = shape_of(recipe)
    checkpoint, drafts = disk_parts(shape, recipe)
    assert checkpoint.size == PUBLISHED_MODELS[DS].checkpoint_bytes() and drafts.size == 4 * 26 * 3 * 2048 * 1408
    assert training_bytes(shape, recipe)[0] == checkpoint.size + 16 * 26 * 3 * 2048 * 1408
    head = load_recipe("deepseek-v3.1")
    assert training_bytes(shape_of(head), head)[0] == pytest.approx(2 * 671e9, rel=1e-3)  # in bf16, without its MTP


# --- shapes ---

PUBLISHED: dict[str, dict[str, Any]] = {
    DS: {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    },
    "DeepSeek-V3.1": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "GPT-OSS-20B": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, config in PUBLISHED.items() if config["model_type"] in FAMILIES])
def test_a_config_gives_the_published_shape(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", **PUBLISHED[name]}))
    shape, published = folder_shape(tmp_path, name), find_geometry(name)
    same: dict[str, Any] = {"source": "", "hub_ids": (), "mtp_layers": 0}
    assert replace(shape.geometry, **same) == replace(published, **same)
    assert not shape.counted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantised as 'awq'.*fp8, mxfp4"),
        ({"dtype": "float64"}, "weights in float64.*bfloat16"),
        ({"model_type": "llama"}, "not a supported MoE family"),
    ],
)
def test_a_config_that_cannot_be_planned_for(change: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[DS], **change}))
    with pytest.raises(MoexpError, match=message):
        folder_shape(tmp_path, "x")


def test_a_local_folder_is_read_in_place_of_the_published_config(tiny_folder: Any, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_folder(model_type="deepseek_v2", dtype=torch.bfloat16), tmp_path / "mine"))
    result = moexp_("--recipe", "ds-v2-lite", "--set", f"target.path={folder}", "--platform", "cg")
    assert result.exit_code == 0, result.stderr
    assert "3 of them with 16 routed experts (top-4) and 1 shared" in result.stdout and "counted" in result.stdout


def test_an_unknown_id_is_one_line_until_its_config_is_in_the_cache(
    tiny_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    arguments = ("--recipe", "ds-v2-lite", "--set", "target.path=someone/moe", "--platform", "cg")
    result = moexp_(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "the shape of someone/moe is not known" in result.stderr and "deepseek-ai/DeepSeek-V3.1" in result.stderr
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--someone--moe" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (tmp_path / "models--someone--moe" / "refs").mkdir()
    (tmp_path / "models--someone--moe" / "refs" / "main").write_text(commit)
    shutil.copy(tiny_folder() / "config.json", snapshot)
    result = moexp_(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("ds-v2-lite: someone/moe at main\n") and "calculated" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "tiny"), "the target is not built .*run: moexp build-target --recipe tiny"),
        (("--recipe", "ds-v2-lite", "--platform", "cgg"), "no platform 'cgg'.*did you mean cg"),
        (("--recipe", "ds-v2-lite", "--set", "target.path=/none"), "no folder /none .target.path."),
        (("--recipe", "ds-v2-lite", "--set", "target.path=a b"), "the shape of a b is not known"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments: tuple[str, ...], message: str):
    result = moexp_(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(result.stderr)


# --- speeds ---


@pytest.mark.parametrize("recipe", ["ds-v2-lite", "moonlight-16b-a3b"])
def test_draftexperts_platforms_give_its_ar_and_its_formulas(recipe: str):
    chosen = load_recipe(recipe)
    found = {speed.platform.name: speed for speed in speeds(chosen)}
    assert list(found) == ["cg", "mn"]
    for place, speed in found.items():
        keys = {"target": HUB_RECIPES[recipe], "platform": place.upper()}
        table = [row for row in load_paper("draftexpert").table(2).rows if keys.items() <= row.items()]
        reported = {row["method"]: row for row in table}
        ar, computing_ms = rate(speed, "AR"), speed.compute_ms
        assert computing_ms is not None
        assert ar.tokens_per_s == pytest.approx(reported["ar"]["tokens_per_s"], rel=1e-6) and ar.tag == "estimated"
        assert 1e3 / (computing_ms + speed.load_ms) < ar.tokens_per_s < 1e3 / max(computing_ms, speed.load_ms)
        assert rate(speed, "AR, at most").tokens_per_s == pytest.approx(1e3 / max(computing_ms, speed.load_ms))
        full = rate(speed, "full method, reported")
        assert full.tag == "paper" and full.speedup == reported["draft-expert"]["speedup"]
        assert full.tokens_per_s == pytest.approx(reported["draft-expert"]["tokens_per_s"], rel=0.01)
        assert rate(speed, "draft expert, K = 4").tag == "paper"
    fixed = rate(found["cg"], "draft expert, K = 4").speedup
    if recipe == "ds-v2-lite":  # acceptance 0.85, cost 1.05 over a top-1 4.7 times as fast, verification 2.35
        assert fixed == pytest.approx((1 + 4 * 0.85) / (4 * 1.05 / 4.7 + 2.35))


def test_ecospecs_targets_on_its_server():
    (speed,) = speeds(load_recipe("qwen3-235b-a22b"))
    assert speed.platform.name == "8xh200"
    assert rate(speed, "AR").tokens_per_s == pytest.approx(1 / 0.49, rel=0.02)  # its parts add up; here they overlap
    assert rate(speed, "EcoSpec").speedup == pytest.approx(2.32 * 0.49 / 0.742)
    assert [r.speedup for r in speed.rates if r.what == "  reported"] == [1.22, 1.36]


def test_elsewhere_the_bytes_bound_speculation():
    (speed,) = speeds(load_recipe("qwen3-235b-a22b"), "cg")
    assert rate(speed, "EcoSpec, bytes' bound").speedup == pytest.approx(2.32 * 8 / 20.5)
    assert "no constants for this model" in speed.note
    moved = 94 * 8 * find_geometry("Qwen3-235B-A22B").expert_bytes()
    assert speed.load_ms == pytest.approx(moved / load_platform("cg").link.bandwidth_gb_s / 1e6)


def test_a_model_that_a_platform_does_not_list_computes_by_the_weights_that_it_uses():
    recipe, cg = load_recipe("olmoe-1b-7b"), load_platform("cg")
    (speed,) = speeds(recipe)
    by = find_geometry("OLMoE-1B-7B").active_params / find_geometry(DS).active_params
    assert speed.platform.name == "cg"
    assert speed.compute_ms == pytest.approx(cg.compute.costs(1).step("ar", 1, False).total_s(26, 6) * by * 1e3)
    assert [rate.tokens_per_s for rate in speed.rates][-1] is None  # no paper has its acceptance


def calibrated(model: str, **slots: Any) -> None:
    """What `moexp calibrate` would write, with CG's constants."""
    cg = load_platform("cg")
    constants = dict(cg.constants()) | {f"slots.{key}": value for key, value in slots.items()}
    values: dict[str, Any] = {"name": "this-machine", "summary": cg.summary, "tag": "measured", "models": [model]}
    for key, value in constants.items():
        section, _, name = key.partition(".")
        if section not in ("given", "checks"):
            values.setdefault(section, {})[name] = {"value": value, "source": "calibrated"}
    machine_file().parent.mkdir(parents=True)
    machine_file().write_text(dump_yaml(values))


def test_this_machine_counts_once_it_is_calibrated_for_the_recipe():
    recipe = load_recipe("ds-v2-lite")
    calibrated("ds-v2-lite")
    *_, speed = speeds(recipe)
    assert speed.platform.tag == "measured" and not speed.note
    assert rate(speed, "AR").tokens_per_s == pytest.approx(rate(speeds(recipe, "cg")[0], "AR").tokens_per_s)
    union = metrics.uniform_union(64, 6, 5)
    bound = rate(speed, "draft expert, bytes' bound")
    assert bound.speedup == pytest.approx(4.4 * 6 / union) and bound.tag == "estimated"


def test_a_machine_calibrated_for_another_target_gives_its_link_alone():
    calibrated("pocket")
    (speed,) = speeds(load_recipe("ds-v2-lite"), "this-machine")
    assert speed.compute_ms is None and "calibrated for pocket" in speed.note
    assert [rate.what for rate in speed.rates][0] == "AR, at most"
    assert "unknown" in run_plan(load_recipe("ds-v2-lite"), "this-machine")


def test_what_a_platform_keeps_is_not_loaded():
    pool = PUBLISHED_MODELS[DS].pool_bytes()
    calibrated("ds-v2-lite", bytes=pool // 4, policy="lru")
    recipe = load_recipe("ds-v2-lite")
    (speed,), (cold,) = speeds(recipe, "this-machine"), speeds(recipe, "cg")
    assert speed.held == pytest.approx(0.25)
    assert speed.load_ms == pytest.approx(0.75 * cold.load_ms)
