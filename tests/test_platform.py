from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.base.formula import evaluate, names_in
from moexp.base.yamlio import dump_yaml, read_yaml
from moexp.bench.platforms import cg_ratio, mn_ratio
from moexp.cli import main as cli
from moexp.config import locations
from moexp.config.recipe import list_recipes, load_recipe
from moexp.data.traces import RoutingGeometry
from moexp.papers import load_paper
from moexp.sim.machine.cycles import Cycle, key_table, routed_step
from moexp.sim.machine.run import simulate
from moexp.sim.platforms.files import THIS_MACHINE, find_platform, list_platforms, load_platform, machine_file
from moexp.sim.platforms.geometry import PRECISIONS, PUBLISHED_MODELS, ModelGeometry, find_geometry, grouped_attention
from moexp.sim.platforms.platform import SimPlatform
from moexp.sim.platforms.simulated import load_simulated
from moexp.target.spec import MoESpec

SHIPPED = {"8xh200", "cg", "mn"}
LOADED = [(info.name, model) for info in list_platforms() for model in info.models]
DS, ML = "DeepSeek-V2-Lite", "Moonlight-16B-A3B"


def cell(rows: list[dict[str, Any]], column: str, **keys: Any) -> Any:
    (row,) = [row for row in rows if all(row.get(key) == value for key, value in keys.items())]
    return row[column]


def edited(folder: Path, change: Any, name: str = "cg") -> Path:
    """A copy of a shipped platform's file that `change` has altered in place."""
    said = read_yaml(find_platform(name))
    change(said)
    path = folder / "mine.yaml"
    path.write_text(dump_yaml(said))
    return path


def compute_us(platform: SimPlatform, geometry: ModelGeometry, experts: float) -> float:
    """An AR step without loading that computes so many experts a layer."""
    costs = platform.compute.costs(geometry.dense_layers)
    return costs.step("ar", 1, False).total_s(geometry.moe_layers, experts) * 1e6


def ar_compute_us(platform: SimPlatform, geometry: ModelGeometry) -> float:
    return compute_us(platform, geometry, geometry.top_k)


def ar_load_us(platform: SimPlatform, geometry: ModelGeometry) -> float:
    return platform.link.load_us(geometry.experts_per_token, platform.expert_bytes(geometry))


def of_spec(spec: MoESpec) -> ModelGeometry:
    width = spec.hidden_size // spec.num_heads
    return ModelGeometry(
        name=spec.model_type,
        layers=spec.num_layers,
        moe_layers=len(spec.moe_layers),
        hidden=spec.hidden_size,
        experts=spec.num_experts,
        top_k=spec.top_k,
        shared_experts=spec.num_shared,
        expert_width=spec.expert_width,
        attention=grouped_attention(spec.hidden_size, heads=spec.num_heads, kv_heads=spec.num_kv_heads, width=width),
        dense_width=0,
        vocab=spec.vocab_size,
        source="a spec",
        precision="fp32",
    )


# --- shipped platforms ---


def test_platforms_are_listed_with_a_line_that_fits_a_terminal_and_are_no_recipes():
    infos = list_platforms()
    assert {info.name for info in infos} == SHIPPED
    assert all(0 < len(info.summary) <= 80 - len(THIS_MACHINE) - len("constants") - 4 for info in infos)
    assert not SHIPPED & {info.name for info in list_recipes()}


@pytest.mark.parametrize(("name", "model"), LOADED)
def test_every_constant_of_a_shipped_platform_has_a_source(name: str, model: str):
    platform = load_platform(name, model)
    constants = dict(platform.constants())
    assert constants.keys() == platform.sources.keys()
    assert all(len(source) > 3 for source in platform.sources.values())
    assert all(value >= 0 for value in constants.values() if not isinstance(value, str))
    assert (platform.name, platform.model) == (name, model)


@pytest.mark.parametrize("model", [model for name, model in LOADED if name == "8xh200"])
def test_the_parts_of_an_h200_step_add_up_to_the_reported_ar_rate(model: str):
    platform, geometry = load_platform("8xh200", model), find_geometry(model)
    step_us = ar_compute_us(platform, geometry) + ar_load_us(platform, geometry)
    assert 1e6 / step_us == pytest.approx(platform.checks["ar_tokens_per_s"], rel=1e-9)


@pytest.mark.parametrize("name", ["cg", "mn"])
@pytest.mark.parametrize("model", [DS, ML])
def test_simulated_plain_decoding_has_the_reported_rate(name: str, model: str):
    geometry = find_geometry(model)
    reported = cell(
        load_paper("draftexpert").table(2).rows, "tokens_per_s", target=model, platform=name.upper(), method="ar"
    )
    table = key_table(range(1, 1 + geometry.moe_layers), geometry.experts)
    rng = np.random.default_rng(0)
    routing_TLk = rng.random((20, geometry.moe_layers, geometry.experts)).argsort(-1)[:, :, : geometry.top_k]
    cycles = [Cycle([routed_step(table, routing_Lk[:, None], "ar")], 1) for routing_Lk in routing_TLk]
    recorded = RoutingGeometry(tuple(range(1, 1 + geometry.moe_layers)), geometry.experts, geometry.top_k)
    simulated = load_simulated(name, recorded, 0, model)
    assert simulate(cycles, simulated.machine, simulated.cache).tokens_per_s == pytest.approx(reported, rel=1e-6)


def test_cg_carries_what_the_papers_ar_rate_and_draft_speedup_imply():
    paper = load_paper("draftexpert")
    step_s = 1 / cell(paper.table(2).rows, "tokens_per_s", target=DS, platform="CG", method="ar")
    assert 1 / step_s == 2.19
    load_s = step_s * cg_ratio().value / (1 + cg_ratio().value)
    moved = 26 * 6 * 3 * 2048 * 1408 * 2  # MoE layers x top-k x bytes of an expert in bf16
    cg = load_platform("cg")
    assert cg.link.bandwidth_gb_s == pytest.approx(moved / load_s / 1e9) == pytest.approx(6.257, abs=1e-3)
    assert cg.link.peak_gb_s == pytest.approx(31.5, abs=0.05)
    assert cg.checks["least_gb_s"] == pytest.approx(moved / step_s / 1e9) == pytest.approx(5.91, abs=0.01)
    assert cg.given["ar_load_us"] / cg.given["exposed_us"] == pytest.approx(cg_ratio().value)
    assert ar_load_us(cg, find_geometry(DS)) == pytest.approx(cg.given["ar_load_us"])
    assert load_platform("cg", ML).link == cg.link  # the link belongs to the platform, whatever runs on it


def test_mn_needs_more_than_its_flash_carries():
    paper = load_paper("draftexpert")
    staged = cell(paper.table(1).rows, "ar_tps_flash_staged", platform="MN")
    resident = cell(paper.table(1).rows, "ar_tps_resident_reference", platform="MN")
    moved = 26 * 6 * 3 * 2048 * 1408 * 18 / 32  # 18 bytes a block of 32 weights
    mn, geometry = load_platform("mn"), find_geometry(DS)
    assert mn.checks["needed_gb_s"] == pytest.approx(moved * staged / 1e9) == pytest.approx(7.73, abs=0.01)
    assert mn.link.peak_gb_s == pytest.approx(5.8)
    assert mn.checks["cached_share_at_least"] == pytest.approx(1 - 5.8 / (moved * staged / 1e9), abs=1e-6)
    # Shared experts and five of six routed ones are computed while a layer's others come.
    c = mn.compute
    hidden_us = 26 * (c.shared_us_per_layer + 5 * c.routed_us_per_expert)
    load_us = 1e6 / staged - 1e6 / resident + hidden_us
    assert mn.link.bandwidth_gb_s == pytest.approx(moved / load_us / 1e3)
    assert 1.5 * mn.link.peak_gb_s < mn.link.bandwidth_gb_s < 2 * mn.link.peak_gb_s
    assert mn.checks["cached_share_apart"] == pytest.approx(0.78, abs=0.005)
    assert mn.checks["cached_share_overlapped"] == pytest.approx(0.44, abs=0.005)
    assert 1e6 / ar_compute_us(mn, geometry) == pytest.approx(resident)
    added_us = ar_load_us(mn, geometry) - hidden_us
    assert added_us / ar_compute_us(mn, geometry) == pytest.approx(mn_ratio().value)


@pytest.mark.parametrize("name", ["cg", "mn"])
@pytest.mark.parametrize("model", [DS, ML])
def test_draft_experts_cost_what_table_3_adds_for_them(name: str, model: str):
    rows = [row for row in load_paper("draftexpert").table(3).rows if row["platform"] == name.upper()]
    platform, geometry = load_platform(name, model), find_geometry(model)
    transfer_us = platform.link.load_us(1, platform.expert_bytes(geometry))

    def four_tokens_us(drafter: str, draft_expert_us: float) -> float:
        unique = cell(rows, "unique_draft", target=model, drafter=drafter)
        shared_us = platform.compute.shared_us_per_layer
        beside_us = shared_us + draft_expert_us  # what a layer's loading hides
        apart_us = compute_us(platform, geometry, 1) - geometry.moe_layers * shared_us
        return 4 * apart_us + unique * max(transfer_us, beside_us) + (4 * geometry.moe_layers - unique) * beside_us

    assert platform.compute.draft_expert_us is not None
    cost = four_tokens_us("draft-expert", platform.compute.draft_expert_us) / four_tokens_us("top-1", 0)
    assert cost == pytest.approx(cell(rows, "cost", target=model, drafter="draft-expert"))


@pytest.mark.parametrize(("model", "off"), [("Qwen3-235B-A22B", 0.05), ("GPT-OSS-120B", 0.22), ("DeepSeek-V3.1", 0.05)])
def test_h200_gives_ecospecs_steps_and_nearly_the_one_it_was_not_fitted_to(model: str, off: float):
    rows = [row for row in load_paper("ecospec").table(3).rows if row["target"] == model]
    platform, geometry = load_platform("8xh200", model), find_geometry(model)
    transfer_us = platform.link.load_us(1, platform.expert_bytes(geometry))

    def step_s(experts: float) -> float:
        loading_us = geometry.moe_layers * experts * transfer_us
        return (compute_us(platform, geometry, experts) + loading_us) / 1e6

    for row in rows:
        measured = row.get("verify_s", row["step_s"])
        allowed = off if row["method"] == "EcoSpec" else 1e-6
        assert step_s(row["experts_per_layer"]) == pytest.approx(measured, rel=allowed)
    assert platform.checks["roofline_ar_us"] < 0.02 * 1e6 / platform.checks["ar_tokens_per_s"]


# --- what is refused ---


def test_an_unknown_platform_or_model_names_the_valid_ones():
    with pytest.raises(MoexpError, match=r"did you mean 8xh200.*8xh200, cg, mn .*run moexp calibrate"):
        load_platform("8xh100")
    with pytest.raises(MoexpError, match="no platform 'nowhere/cg'"):
        load_platform("nowhere/cg")
    with pytest.raises(MoexpError, match=f"no constants for 'GPT-OSS-120B'.*{DS}, {ML}"):
        load_platform("cg", "GPT-OSS-120B")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said["link"].update(bandwith_gb_s={}), "unknown key link.bandwith_gb_s.*link.bandwidth_gb_s"),
        (lambda said: said.update(lnik={}), "unknown key lnik.*nearest is link"),
        (lambda said: said["link"]["latency_us"].update(valu=1), "latency_us.valu.*nearest is link.latency_us.value"),
        (lambda said: said["link"].update(latency_us=3.0), "link.latency_us has no source"),
        (lambda said: said["link"].update(latency_us={"value": 3.0}), "link.latency_us has no source"),
        (lambda said: said["link"].update(latency_us={"value": 3.0, "source": " "}), "link.latency_us has no source"),
        (lambda said: said["given"].update(x={"value": 3.0}), "given.x has no source"),
        (lambda said: said["link"].update(latency_us={"source": "a"}), "exactly one of value, formula and paper"),
        (lambda said: said["link"]["concurrency"].update(value="3"), 'bad value for link.concurrency: "3"'),
        (lambda said: said["link"]["latency_us"].update(value="3"), "link.latency_us is not a number"),
        (lambda said: said["link"]["latency_us"].update(value=-1.0), "bad value for link.latency_us: -1"),
        (
            lambda said: said["precision"]["experts"].update(value="fp7"),
            "bad value for precision.experts: .fp7.*bf16, fp8.*native",
        ),
        (lambda said: said["link"].pop("peak_gb_s"), "missing value for link.peak_gb_s"),
        (lambda said: said.pop("models"), "models"),
        (lambda said: said["link"]["peak_gb_s"].update(formula="1 +"), "not a formula"),
        (lambda said: said["link"]["peak_gb_s"].update(formula="given.gpu_tflop"), "nearest is given.gpu_tflops"),
        (lambda said: said["link"]["peak_gb_s"].update(formula="model.expert_byte"), "nearest is model.expert_bytes"),
        (lambda said: said["link"]["peak_gb_s"].update(formula="link.peak_gb_s"), "need each other"),
        (
            lambda said: said["given"]["top1_speedup"]["paper"]["row"].update(drafter="top-9"),
            "names 0 rows of Figure 2",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_error_that_names_it(change: Any, message: str, tmp_path: Path):
    path = edited(tmp_path, change)
    with pytest.raises(MoexpError, match=message) as caught:
        load_platform(path)
    assert str(path) in str(caught.value)


def test_formulas_are_arithmetic_and_nothing_else():
    assert evaluate("-2 ** 2 + max(a.b, 3) / 4 - 1e-1", {"a.b": 6.0}.__getitem__) == pytest.approx(-4 + 1.5 - 0.1)
    assert names_in("a.b * (c + a.b) / max(d, 1)") == ["a.b", "c", "d"]
    for bad in ("__import__('os')", "a[0]", "'1'", "True", "a if b else c", "max()", "(a).b()"):
        with pytest.raises(MoexpError, match="formula"):
            evaluate(bad, lambda name: 1.0)
    with pytest.raises(MoexpError, match="division by zero"):
        evaluate("1 / 0", lambda name: 1.0)


def test_neither_platforms_nor_geometries_import_torch():
    script = "import sys, moexp.sim.platforms.files as p; p.list_platforms(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent).returncode == 0


# --- cost ---


def test_costs_are_of_the_first_row_and_of_each_further_one():
    compute = load_platform("cg").compute.model_copy(update={"block_rows": 8})
    costs = compute.costs(0)
    draft, padded = costs.step("draft", 3, False), costs.step("verify", 3, False)
    first_us, row_us = compute.attention_us_per_layer, compute.attention_us_per_token
    assert draft.lead_s == pytest.approx((first_us + 2 * row_us + compute.router_us) * 1e-6)
    assert padded.lead_s == pytest.approx((first_us + 7 * row_us + compute.router_us) * 1e-6)
    expert_us = compute.routed_us_per_expert + 2 * compute.routed_us_per_token
    assert draft.union_s(4, 12) == pytest.approx(expert_us * 1e-6)
    assert [costs.step("verify", rows, False) == padded for rows in (1, 8, 9)] == [True, True, False]


def test_slots_are_bytes_or_a_share_of_all_experts():
    slots, size = load_platform("mn").slots, 1000
    assert slots.experts(64, size) is None
    assert slots.model_copy(update={"fraction": 0.25}).experts(64, size) == 16
    assert slots.model_copy(update={"bytes": 5_500}).experts(64, size) == 5


# --- geometry ---


@pytest.mark.parametrize(
    ("name", "moe_layers", "megabytes"),
    [
        (DS, 26, 17.30),
        (ML, 26, 17.30),
        ("Qwen3-235B-A22B", 94, 37.75),
        ("GPT-OSS-120B", 36, 13.24),  # 4.25 bits a weight and bf16 biases; the paper's 12.45 leaves the scales out
        ("DeepSeek-V3.1", 58, 44.05),  # 8 bits and a scale a block; the paper's 44.04 leaves the scales out
    ],
)
def test_experts_weigh_what_the_published_configs_imply(name: str, moe_layers: int, megabytes: float):
    geometry = find_geometry(name)
    assert geometry.moe_layers == moe_layers
    assert geometry.expert_bytes() / 1e6 == pytest.approx(megabytes, abs=0.005)


def test_the_papers_megabytes_an_expert_are_weights_without_scales():
    assert find_geometry("GPT-OSS-120B").expert_params * 0.5 / 1e6 == pytest.approx(12.45, abs=0.01)
    assert find_geometry("DeepSeek-V3.1").expert_params / 1e6 == pytest.approx(44.04, abs=0.005)
    assert find_geometry("Qwen3-235B-A22B").expert_bytes() / 1e6 == pytest.approx(37.75, abs=0.005)


def test_deepseek_v2_lite_weighs_what_the_paper_says():
    figure, geometry = load_paper("draftexpert").figures[1], find_geometry(DS)
    assert geometry.routed_params / 1e9 == pytest.approx(figure["routed_params_b"], abs=0.05)
    assert geometry.pool_bytes() / 2**30 == pytest.approx(figure["routed_bf16_gib"], abs=0.05)
    others = geometry.resident_bytes() + geometry.head_params * 2  # and the embedding
    assert others / 2**30 == pytest.approx(figure["non_routed_gib"], abs=0.05)
    assert (geometry.layers, geometry.experts_per_token, geometry.layer_experts) == (27, 156, 1664)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3-235B-A22B", 235), ("DeepSeek-V3.1", 671), ("GPT-OSS-120B", 117)]
)
def test_models_have_as_many_weights_as_their_names_say(name: str, billions: float):
    geometry = find_geometry(name)
    total = geometry.routed_params + geometry.resident_params + geometry.head_params
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("name", "fitted"), [("Qwen3-235B-A22B", 15.2), ("DeepSeek-V3.1", 17.1)])
def test_resident_bytes_are_ecospecs_constant(name: str, fitted: float):
    assert find_geometry(name).resident_bytes() / 1e9 == pytest.approx(fitted, rel=0.04)


def test_ecospecs_constant_for_gpt_oss_is_all_its_weights_at_four_bits():
    geometry = find_geometry("GPT-OSS-120B")
    assert geometry.resident_params * 0.5 / 1e9 == pytest.approx(0.8, abs=0.05)
    assert geometry.resident_bytes() / 1e9 == pytest.approx(3.1, abs=0.05)  # the checkpoint keeps them in bf16


def test_precisions_count_their_scales():
    assert {name: precision.bytes_per_weight for name, precision in PRECISIONS.items()} == {
        "fp32": 4.0, "bf16": 2.0, "fp8": 1 + 4 / 16384, "q4_0": 0.5625, "mxfp4": 0.53125,
    }  # fmt: skip
    with pytest.raises(MoexpError, match="unknown precision 'int3'.*q4_0"):
        PUBLISHED_MODELS[DS].expert_bytes("int3")
    with pytest.raises(MoexpError, match=f"no geometry of 'gpt-2'.*{DS}"):
        find_geometry("gpt-2")


@pytest.mark.parametrize(
    ("name", "published_bytes"),
    [
        (DS, 31_412_968_448),
        ("Qwen3-235B-A22B", 470_187_269_120),
        ("GPT-OSS-120B", 65_248_815_744),
        ("DeepSeek-V3.1", 688_586_727_753),  # 685 billion weights: 671 and those for multi-token prediction
        ("OLMoE-1B-7B", 13_838_323_712),
        ("Qwen3-30B-A3B", 61_064_245_248),
        ("GPT-OSS-20B", 13_761_264_768),
        ("Mixtral-8x7B", 93_405_585_408),
    ],
)
def test_checkpoints_weigh_what_their_shard_index_says(name: str, published_bytes: int):
    assert find_geometry(name).checkpoint_bytes() == pytest.approx(published_bytes, rel=1e-4)


def test_each_repository_belongs_to_one_shape():
    ids = [hub_id for geometry in PUBLISHED_MODELS.values() for hub_id in geometry.hub_ids]
    assert len(ids) == len(set(ids)) and all(geometry.hub_ids for geometry in PUBLISHED_MODELS.values())


def test_a_tokens_keys_and_values():
    assert find_geometry(DS).kv_bytes(1) == 27 * 2 * 16 * (128 + 64) * 2  # expanded latents
    assert find_geometry("Qwen3-30B-A3B").kv_bytes(1000) == 1000 * 48 * 2 * 4 * 128 * 2


# --- this machine ---


def moexp_(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def built(moexp_home: Path) -> Path:
    """$MOEXP_HOME with the tiny target."""
    from moexp.learn.target.build import build_target

    recipe = load_recipe("tiny")
    build_target(recipe, locations.target_folder(recipe), cache=Path("unused"), provenance={})
    return moexp_home


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small samples."""
    from moexp.sim.calibration import calibrate

    quick = partial(calibrate.calibrate, rounds=2, repeats=4, sample_bytes=1 << 20)
    monkeypatch.setattr(calibrate, "calibrate", quick)


def test_calibrate_writes_a_platform_that_loads(built: Path, small: None):
    result = moexp_("calibrate", "--recipe", "tiny")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "AR step with every expert in place" in result.output
    platform = load_platform(THIS_MACHINE)
    assert (platform.tag, platform.model, platform.name) == ("measured", "tiny", THIS_MACHINE)
    assert platform.provenance["command"].startswith("moexp")
    assert {"git", "versions", "hardware", "threads"} <= platform.provenance.keys()
    assert all(word in platform.sources["link.bandwidth_gb_s"] for word in ("measured", "2 under way"))
    assert (platform.link.concurrency, platform.link.prefetch_concurrency, platform.compute.block_rows) == (1, 1, 8)
    assert {info.name for info in list_platforms()} == SHIPPED | {THIS_MACHINE}
    assert THIS_MACHINE in moexp_("platforms").output

    spec = MoESpec("glm4_moe", 64, 3, (1, 2), 8, 2, 1, 32, 256, 4096, 4, 2)
    geometry = of_spec(spec)
    assert compute_us(platform, geometry, geometry.top_k) == pytest.approx(platform.checks["ar_step_us"], rel=0.25)
    assert platform.compute.routed_us_per_expert > 0 and platform.compute.attention_us_per_layer > 0


def test_calibrate_keeps_the_file_it_has_on_a_full_disk(built: Path, small: None, tmp_path: Path, monkeypatch):
    out = tmp_path / "mine.yaml"
    out.write_text("old")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    result = moexp_("calibrate", "--recipe", "tiny", "--out", str(out))
    assert result.exit_code == 2
    assert result.stderr.count("moexp: error: disk full") == 1 and "Traceback" not in result.output
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("mine.yaml", "old")]


def test_calibrate_says_where_o_direct_is_refused(built: Path, tmp_path: Path, monkeypatch):
    from moexp.runtime.store import disk
    from moexp.sim.calibration.calibrate import calibrate

    monkeypatch.setattr(disk, "_open_direct", lambda path, flags: None)
    with pytest.warns(RuntimeWarning, match="O_DIRECT is refused") as warned:
        path, platform = calibrate(load_recipe("tiny"), tmp_path, rounds=1, repeats=1, sample_bytes=1 << 16)
    assert len([each for each in warned if "O_DIRECT" in str(each.message)]) == 1
    assert path == tmp_path / f"{THIS_MACHINE}.yaml" and load_platform(path) == platform
    assert "buffered" in platform.sources["link.bandwidth_gb_s"]


def test_calibrate_needs_a_built_target():
    result = moexp_("calibrate", "--recipe", "tiny")
    assert result.exit_code == 2 and "run: moexp build-target --recipe tiny" in result.stderr
    assert not machine_file().exists()


def test_experts_that_exceed_the_pool_have_stand_ins(tiny_folder):
    from moexp.sim.calibration.step_timer import resident_store
    from moexp.target.load import load_target

    target = load_target(tiny_folder())
    store, stand_ins = resident_store(target, limit=3 * target.index.expert_bytes)
    assert stand_ins and len({id(weights) for weights in store.weights.values()}) == 3  # type: ignore[attr-defined]
    assert store.expert_bytes == target.index.expert_bytes
    assert not resident_store(target)[1]
