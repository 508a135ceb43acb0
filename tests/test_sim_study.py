"""From recordings and traces to tables: fits, validation, the command, and sweeps that survive a kill."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.cli import main as cli
from moexp.config.decode import DecodeSection
from moexp.config.recipe import list_recipes
from moexp.data.traces import RoutingGeometry, TraceManifest, TraceShard, expert_demands, read_trace, write_shard
from moexp.metrics import expected_acceptance
from moexp.records import RecordWriter, RequestRecord, StepRecord
from moexp.runtime.opening import traced_demands
from moexp.runtime.recording.files import RecordedPass, RecordingInfo
from moexp.runtime.recording.recorder import Recorder
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.link import LinkModel
from moexp.sim.machine.machine import MachineModel
from moexp.sim.machine.run import simulate
from moexp.sim.platforms.files import load_platform
from moexp.sim.platforms.geometry import find_geometry
from moexp.sim.platforms.simulated import Simulated, on_platform
from moexp.sim.routing.blocks import Setting
from moexp.sim.routing.sources import Source, open_source
from moexp.sim.routing.traced import traced_blocks
from moexp.sim.studies.study import study, write_study
from moexp.sim.studies.sweep_file import load_sweep, parts_of
from moexp.sim.validation.fit import fit_steps, link_of
from moexp.sim.validation.validate import COLUMNS, machine_of, resident_fit, validate
from moexp.tables.core.table import to_csv
from moexp.tables.draftexpert.index import build_tables

pytestmark = pytest.mark.e2e

LAYERS, EXPERTS, TOP_K, K = (1, 2), 8, 3, 3
AR = {"drafter": "ar", "r": 1, "policy": "fixed", "tree": None}
TOP_1 = AR | {"drafter": "top-r"}
TOP_2 = TOP_1 | {"r": 2}
DRAFTS = AR | {"drafter": "draft-expert"}
METHODS: dict[str, dict[str, Any]] = {"ar": AR, "top-1": TOP_1, "top-2": TOP_2, "drafts": DRAFTS}
RESIDENT_STORE = {"kind": "resident", "policy": "none", "capacity": None, "expert_bytes": 1000, "moved_bytes": 1000}
DISK = RESIDENT_STORE | {"kind": "disk", "io_threads": 8, "pieces": 2, "pace": None, "moved_bytes": 4096}
SIMULATED = Simulated(
    MachineModel(LinkModel(1e6), ComputeCosts(attention_s=1e-3, expert_s=1e-4, draft_expert_s=1e-4), 1000),
    2, "none", "stand-in", "tiny",
)  # fmt: skip


def routed(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.random((len(LAYERS), rows, EXPERTS)).argsort(-1)[:, :, :TOP_K].astype(np.int16)


def made_up_run(folder: Path, store: dict[str, Any], time_of: Any, *, prompts: int = 3, cycles: int = 6) -> None:
    """A platform's folder as a benchmark leaves it; `time_of(method, steps)` gives draft and verify seconds."""
    rng = np.random.default_rng(0)
    info = RecordingInfo("f" * 64, RoutingGeometry(LAYERS, EXPERTS, TOP_K), store, METHODS)
    with (
        RecordWriter(folder / "steps.jsonl") as steps_file,
        RecordWriter(folder / "requests.jsonl") as requests_file,
        Recorder(folder, info) as recorder,
    ):
        for request in range(prompts):
            for label, method in METHODS.items():
                steps, routed_passes = [], list[RecordedPass]()
                for number in range(cycles):
                    drafts = 0 if label == "ar" else K
                    rows = routed(rng, drafts + 1)
                    r, drafted = method["r"], label == "drafts"
                    passes = [RecordedPass("draft", rows[:, at : at + 1], r, drafted) for at in range(drafts)]
                    passes.append(RecordedPass("verify" if drafts else "ar", rows))
                    routed_passes += passes
                    union = sum(len(np.unique(ids)) for ids in rows)
                    accepted = min(number % 4, drafts)
                    draft_s, verify_s = time_of(method, drafts, union)
                    steps.append(
                        StepRecord(
                            request, number, label, drafts, accepted, accepted + 1, [1] * (accepted + 1), draft_s,
                            verify_s, draft_s + verify_s, [0.9, 0.6, 0.3, 0.2][:drafts], unique_verify=union,
                        )
                    )  # fmt: skip
                recorder.keep(request, "chat", label, steps, routed_passes)
                for step in steps:
                    steps_file.write(step)
                tokens = [token for step in steps for token in step.tokens]
                seconds = sum(step.cycle_s for step in steps)
                requests_file.write(
                    RequestRecord(request, "chat", label, 5, len(tokens), 0.0, seconds, "length", tokens)
                )


def resident_times(method: dict[str, Any], drafts: int, union: int) -> tuple[float, float]:
    step_s = 0.004 + 0.0005 * method["r"] * len(LAYERS) + 0.002 * (method["drafter"] == "draft-expert")
    return drafts * step_s, 0.01 + 0.001 * union


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a resident and a disk platform."""
    made_up_run(tmp_path / "run" / "resident", RESIDENT_STORE, resident_times)
    disk = tmp_path / "run" / "local-disk"
    made_up_run(disk, DISK, lambda *step: tuple(2 * seconds for seconds in resident_times(*step)))
    (disk / "probe.json").write_text(json.dumps({"bandwidth_bytes_s": [1e6, 3e6, 2e6], "compute_s": 0.01 + 0.012}))
    (disk / "settings.json").write_text(json.dumps({"tag": "measured"}))
    return tmp_path / "run"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng, folder = np.random.default_rng(1), tmp_path / "trace"
    manifest = TraceManifest("f" * 64, "tiny", RoutingGeometry(LAYERS, EXPERTS, TOP_K), False, "made up", "1")
    sample_T = np.repeat(np.arange(4), 25)
    shard = TraceShard(sample_T, np.tile(np.arange(25), 4), np.zeros(100), routed(rng, 100).swapaxes(0, 1), None)
    manifest.shards.append(write_shard(folder, 0, shard, manifest))
    manifest.complete = True
    manifest.save(folder)
    return folder


# --- DraftExpert's tables ---


def test_tables_have_the_papers_platforms_simulated_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = {"ar": AR, "top-1": TOP_1, "top-2": TOP_2, "draft-expert fixed": DRAFTS}
    monkeypatch.setattr(sys.modules[__name__], "METHODS", named)
    monkeypatch.setattr(sys.modules[__name__], "K", 4)
    made_up_run(tmp_path / "resident", RESIDENT_STORE, resident_times)
    full = {"drafter": "draft-expert", "max_draft": 7, "policy": "confidence-expansion", "tau": 0.5, "budget": 4,
            "prefetch": True, "prefetch_top": None, "prefetch_inline": True, "name": "draft-expert full"}  # fmt: skip
    made_up_run(tmp_path / "local-disk", DISK, resident_times, prompts=1)
    (tmp_path / "local-disk" / "settings.json").write_text(json.dumps({"tag": "measured", "methods": [full]}))
    target = {"name": "tiny", "platforms": ["local-disk"], "top_k": TOP_K}
    (tmp_path / "target.json").write_text(json.dumps(target))
    tables = {table.number: table for table in build_tables(tmp_path, samples=20)}
    rows = {number: [row for row in table.rows if row["tag"] == "simulated"] for number, table in tables.items()}
    for table in tables.values():
        to_csv(table.columns, table.rows)  # every row fits its columns
    assert {row["platform"] for row in rows[2]} == {row["platform"] for row in rows[4]} == {"cg", "mn"}
    assert {row["target"] for row in rows[2]} == {"tiny as DeepSeek-V2-Lite"}
    cg = {str(row["method"]): row for row in rows[2] if row["platform"] == "cg"}
    assert list(cg) == ["ar", "top-1", "top-2", "draft-expert fixed", "draft-expert"]
    assert cg["draft-expert"]["settings"] == "K=4 tau=0.5 B=4 prefetch"
    assert cg["draft-expert fixed"]["speedup"] == pytest.approx(
        float(cg["draft-expert fixed"]["tokens_per_s"] or 0) / float(cg["ar"]["tokens_per_s"] or 0)
    )
    # each top-2 draft token loads more than a top-1 one
    costs = {str(row["drafter"]): float(row["cost"] or 0) for row in rows[3] if row["platform"] == "cg"}
    assert costs["top-1"] == 1 and costs["top-2"] > 1
    verified = {str(row["policy"]): row for row in rows[4] if row["platform"] == "cg"}
    assert verified["ar"]["verify_cost"] == verified["ar"]["cycle_cost"] == 1
    step = verified["fixed"]
    assert float(step["alpha"] or 0) / float(step["cycle_cost"] or 1) == pytest.approx(
        cg["draft-expert fixed"]["speedup"]
    )
    assert any("Simulated" in view.title for view in tables[4].views)
    (tmp_path / "resident" / "routing.parquet").unlink()
    assert not [row for table in build_tables(tmp_path, samples=20) for row in table.rows if row["tag"] == "simulated"]


# --- fits ---


def test_a_fit_finds_the_costs_that_made_the_times(run: Path):
    fit = resident_fit(run / "resident")
    assert (fit.verify_s, fit.verify_expert_s) == pytest.approx((0.01, 0.001))
    assert (fit.draft_s, fit.draft_expert_s, fit.extra_s) == pytest.approx((0.004, 0.0005, 0.002))
    costs = fit.costs(len(LAYERS))
    ar_s = costs.step("ar", 1, False).total_s(len(LAYERS), TOP_K)
    assert ar_s == pytest.approx(0.01 + 0.001 * len(LAYERS) * TOP_K)
    larger = fit.rescaled(0.022, len(LAYERS) * TOP_K)
    assert (larger.verify_expert_s, larger.draft_expert_s) == pytest.approx((0.002, 0.001))


def test_too_few_steps_are_no_fit():
    with pytest.raises(MoexpError, match="too few resident steps"):
        fit_steps([], {}, 2)


def test_links_follow_from_store_and_probe():
    assert link_of(DISK, {"bandwidth_bytes_s": [1.0, 9.0, 2.0]}) == LinkModel(2.0, concurrency=4, background=1)
    paced = DISK | {"pace": {"bandwidth_gb_s": 0.5, "latency_us": 3.0, "concurrency": 2}}
    assert link_of(paced, {}) == LinkModel(5e8, latency_s=3e-6, concurrency=2, serial=True)
    with pytest.raises(MoexpError, match="not probed"):
        link_of(DISK | {"kind": "host"}, {})


def test_validation_says_how_far_off_it_is(run: Path, tmp_path: Path):
    files = validate(run, tmp_path / "results", "tiny")
    rows = list(csv.DictReader(files[0].open()))
    assert list(rows[0]) == COLUMNS and [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert row["run"] == "local-disk" and float(row["simulated_s"]) > 0
        off = (float(row["simulated_s"]) - float(row["measured_s"])) / float(row["measured_s"])
        assert float(row["time_error"]) == pytest.approx(off, rel=1e-4)
        assert row["time_error_loo"] and "resident" in row["calibrated_on"]
    assert "local-disk" in files[1].read_text()
    with pytest.raises(MoexpError, match="no recorded run"):
        validate(tmp_path / "nothing", tmp_path, "tiny")


def test_the_machine_of_a_run_knows_nothing_of_its_times(run: Path):
    from moexp.runtime.recording.files import read_recording

    recording, fit = read_recording(run / "local-disk"), resident_fit(run / "resident")
    model = machine_of(recording, fit, {"bandwidth_bytes_s": [2e6], "compute_s": 0.022})
    assert (model.link.bandwidth_bytes_s, model.expert_bytes, model.capacity) == (2e6, 4096, None)
    assert model.costs.step("ar", 1, False).expert_s == pytest.approx(0.002)


# --- traces ---


def test_acceptance_of_a_trace_is_as_assumed(trace: Path):
    read = read_trace(trace)
    blocks = traced_blocks(read, None, 4)
    assert all(block.accepted == len(block.confidences) for block in blocks._blocks)
    assert sum(cycle.emitted for cycle in blocks.ar()) == 100
    none = traced_blocks(read, [0.0], 4)
    assert all(block.accepted == 0 for block in none._blocks) and len(none._blocks) == 100
    drawn = [block for seed in range(30) for block in traced_blocks(read, [0.7], 3, seed=seed)._blocks]
    whole = [block for block in drawn if len(block.confidences) == 3]
    share = sum(block.accepted for block in whole) / (3 * len(whole))
    assert share == pytest.approx(expected_acceptance(0.7, 3), abs=0.06)
    with pytest.raises(MoexpError, match="probabilities"):
        traced_blocks(read, [1.2], 4)


def test_a_histogram_counts_every_use(trace: Path):
    demands = expert_demands(read_trace(trace))
    assert sum(demands.values()) == 100 * len(LAYERS) * TOP_K and len(demands) == len(LAYERS) * EXPERTS


def test_static_hot_takes_the_targets_longest_trace(trace: Path, moexp_home: Path):
    with pytest.raises(MoexpError, match="static-hot needs a routing trace.*trace-routing"):
        traced_demands("f" * 64)
    (moexp_home / "traces").mkdir()
    trace.rename(moexp_home / "traces" / "mine")
    assert traced_demands("f" * 64) == expert_demands(read_trace(moexp_home / "traces" / "mine"))
    with pytest.raises(MoexpError, match="static-hot needs"):
        traced_demands("0" * 64)


def test_an_oracle_is_a_bound(trace: Path):
    model = MachineModel(LinkModel(1e6), ComputeCosts(attention_s=1e-4), 1000)
    read, setting = read_trace(trace), Setting(max_draft=3)
    rates = [
        simulate(traced_blocks(read, chances, 3).cycles(setting), model).tokens_per_s or 0.0
        for chances in ([0.2], [0.6], None)
    ]
    assert rates == sorted(rates)


# --- the table ---


@pytest.mark.parametrize("cache, capacity", [("none", None), ("lru", 10), ("static-hot", 10)])
def test_a_study_has_ar_and_the_recipes_methods(run: Path, tmp_path: Path, cache, capacity):
    from dataclasses import replace

    simulated = replace(SIMULATED, cache=cache, machine=replace(SIMULATED.machine, capacity=capacity))
    routing = open_source(Source(run / "resident"))
    assert routing.drafter == "drafts"
    rows = study(routing, simulated, DecodeSection(max_draft=2, tau=0.7, budget=1))
    names = ["ar", "fixed K3", "fixed K3, prefetch", "truncated", "truncated, prefetch"]
    assert [row["method"] for row in rows] == names * (1 if capacity is None else 2)
    assert rows[0]["speedup"] == 1 and {row["tag"] for row in rows} == {"simulated"}
    assert rows[1]["prefetch_waste"] is None and rows[2]["prefetch_waste"] is not None
    if capacity is None:  # into few slots, a prefetch may cost an expert that is needed sooner
        assert float(rows[2]["speedup"] or 0) > float(rows[1]["speedup"] or 0)
    files = write_study(tmp_path, rows, ["A note."])
    assert "simulated" in files[1].read_text() and "A note." in files[1].read_text()
    assert len(list(csv.reader(files[0].open()))) == len(rows) + 1


def test_a_trace_is_said_to_be_assumed(trace: Path):
    routing = open_source(Source(trace, acceptance=(0.8, 0.6), max_draft=2))
    rows = study(routing, SIMULATED, DecodeSection())
    assert rows[0]["tag"] == "simulated" and rows[1]["tag"] == "simulated, assumed acceptance"
    assert "0.8, 0.6" in routing.notes[0]


def test_a_method_that_cannot_be_cut_names_those_that_can(run: Path):
    with pytest.raises(MoexpError, match="no method 'ar'.*top-1, top-2, drafts"):
        open_source(Source(run / "resident", "ar"))


# --- sweeps ---

SWEEP = """
recording: {recording}
platform: {platform}
max_draft: [1, 2, 3]
policy: [fixed, confidence-expansion]
tau: [0.5, 0.7]
budget: [0, 3]
prefetch: [true, false]
prefetch_top: [null, 2]
cache: [none, lru]
bandwidth_gb_s: [null, 0.001]
workers: {workers}
"""


def sweep_file(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(SWEEP.format(**values))
    return path


def test_a_sweep_spans_its_grid_once(tmp_path: Path):
    parts = parts_of(load_sweep(sweep_file(tmp_path, recording="r", platform="p", workers=1)))
    assert len(parts) == 4 and len({part.digest for part in parts}) == 4
    # fixed: 3 K x (no prefetch, 2 with); confidence-expansion: 3 K x 2 tau x 2 B x 3
    assert len(parts[0].settings) == 3 * 3 + 3 * 4 * 3 == len(set(parts[0].settings))


@pytest.mark.parametrize(
    "text, message",
    [
        ("recording: r\nplatform: p\nmax_drafts: [1]", "unknown key max_drafts.*nearest is max_draft"),
        ("recording: r\nplatform: p\ncache: [lur]", "bad value for cache"),
        ("recording: r\nplatform: p\ntau: []", "bad value for tau"),
        ("platform: p\nrecording: r\ntrace: t", "recording or trace, not both"),
        ("recording: r", "missing value for platform"),
        ("- 1", "a sweep must be a mapping"),
    ],
)
def test_a_wrong_sweep_is_explained(tmp_path: Path, text, message):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(MoexpError, match=message):
        load_sweep(path)


def test_shipped_sweeps_can_be_read_and_are_no_recipes():
    files = sorted((Path(cli.__file__).parents[2] / "recipes" / "sweeps").glob("*.yaml"))
    assert files
    for file in files:
        sweep = load_sweep(file)
        assert len({part.digest for part in parts_of(sweep)}) == len(parts_of(sweep))
        assert sweep.with_default(Path("here")).source().path == Path("here")
    assert not {file.stem for file in files} & {info.name for info in list_recipes()}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_sweep_goes_on(run: Path, tmp_path: Path, workers):
    """SIGKILL with some parts done: they are not simulated again, and the result is that of a whole run."""
    path = sweep_file(tmp_path, recording=run / "resident", platform="cg", workers=workers)
    code = (
        "import sys, signal, pathlib\n"
        "from moexp.sim.studies import sweep\n"
        "from moexp.sim.studies.sweep_file import load_sweep\n"
        "write = sweep._write\n"
        "def write_one(place, rows):\n"
        "    write(place, rows)\n"
        "    print('written', flush=True)\n"
        "    signal.pause()\n"
        "sweep._write = write_one\n"
        "if __name__ == '__main__':\n"
        "    sweep.run_sweep(load_sweep(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))\n"
    )
    script = tmp_path / "killed_sweep.py"
    script.write_text(code)
    out = tmp_path / "out" / "grid.parquet"
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, str(script), str(path), str(out)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "written\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    parts = out.with_name("grid.parquet.parts")
    kept = {file: file.stat().st_mtime_ns for file in parts.glob("*.parquet")}
    assert len(kept) == 1 and not out.exists()

    from moexp.sim.studies import sweep as sweep_module

    write = sweep_module._write
    sweep = load_sweep(path).model_copy(update={"workers": 1})
    seen: list[Path] = []

    def watched(place: Path, rows: Any) -> None:
        seen.append(place)
        write(place, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_module, "_write", watched)
        sweep_module.run_sweep(sweep, out)
    assert len(seen) == 3 and not set(seen) & set(kept)
    table = pq.read_table(out)
    assert len(table) == 4 * (1 + 45) and not parts.exists()
    assert set(table.column("tag").to_pylist()) == {"simulated"}
    rates = table.column("tokens_per_s").to_pylist()
    again = pq.read_table(sweep_module.run_sweep(sweep, tmp_path / "whole.parquet"))
    assert rates == again.column("tokens_per_s").to_pylist() and all(rate > 0 for rate in rates)


# --- the command ---


def moexp_(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", "--recipe", "tiny", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_writes_tables(run: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = moexp_("--recording", run / "resident", "--platform", "cg")
    assert result.exit_code == 0, result.output
    assert "| ar " in result.output and "simulated" in result.output
    assert len(list((tmp_path / "results" / "tiny" / "simulation").glob("cg-*"))) == 2
    result = moexp_("--trace", trace, "--accept", "0.8,0.5", "--platform", "cg")
    assert result.exit_code == 0 and "assumed" in result.output
    result = moexp_("--sweep", sweep_file(tmp_path, recording=run / "resident", platform="cg", workers=1))
    assert result.exit_code == 0 and (tmp_path / "results/tiny/simulation/grid.parquet").exists()


def test_the_command_validates(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = moexp_("--validate", "--out", run)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "results/tiny/simulation/validation.csv").exists() and "local-disk" in result.output


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "no platform"),
        (["-p", "cg", "--accept", "0.5"], "assumed for traces only"),
        (["-p", "cg", "--trace", "t", "--recording", "r"], "a recording and a trace"),
        (["-p", "cg", "--trace", "t", "--accept", "much"], "probabilities like"),
        (["-p", "cg", "--recording", "nowhere"], "no recording"),
    ],
)
def test_flags_that_do_not_fit_are_explained(flags, message):
    result = moexp_(*flags)
    assert result.exit_code == 2 and message in result.output


def test_a_platform_becomes_a_machine(run: Path):
    platform = load_platform("cg")
    geometry = find_geometry(platform.model)
    recorded = RoutingGeometry(tuple(range(1, 1 + geometry.moe_layers)), geometry.experts, geometry.top_k)
    found = on_platform(platform, geometry, recorded, 0)
    assert found.machine.expert_bytes == platform.expert_bytes(geometry) and found.moe_layers == geometry.moe_layers
    compute, step = platform.compute, found.machine.costs.step("ar", 1, False)
    layer_us = compute.router_us + compute.shared_us_per_layer + geometry.top_k * compute.routed_us_per_expert
    expected_us = compute.fixed_us + geometry.layers * compute.attention_us_per_layer + geometry.moe_layers * layer_us
    assert step.total_s(geometry.moe_layers, geometry.top_k) == pytest.approx(expected_us * 1e-6)
