"""Interleaved runs, platforms, Table 5's trainings and the sweep, end to end on the random tiny target."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.bench import ablation, draftexpert, platforms, runner, tune
from moexp.bench import papers as bench_tables
from moexp.bench.engine import PromptEngine
from moexp.bench.folder import begin_run, fitting_tokens, settled_tokens
from moexp.bench.jobs import Job, RunPlan, make_jobs, select_prompts, tuning_prompts
from moexp.bench.replay import Costs, Cycle, Setting, estimate, record_cycles
from moexp.bench.runner import run_methods
from moexp.cli import main as cli
from moexp.config.decode import StoreSection
from moexp.config.locations import draft_folder, source_cache, target_folder
from moexp.config.recipe import Recipe, load_recipe
from moexp.learn.draft_expert.train import train_draft_expert
from moexp.learn.target.build import build_target
from moexp.records import RequestRecord, StepRecord, read_records
from moexp.runtime.decoding.decode import LogitsDigest, decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Engine
from moexp.runtime.opening import opened_store
from moexp.runtime.verifiers.sampling import Sampling
from moexp.tables.core.run import STEPS
from moexp.tables.draftexpert.labels import AR, FIXED, FULL, LOSSES, METHODS, TOP_1_FULL, TRUNCATED
from moexp.target.load import Target
from moexp.target.opening import find_target, open_draft_experts, open_target

pytestmark = pytest.mark.e2e

CHANGES = [
    "bench.platforms=[local-disk, paced-mn]",
    "bench.workloads=[chat, math]",
    "bench.prompts_per_workload=1",
    "tune.prompts=2",
    "bench.bootstrap_samples=50",
]
TOP_1 = Method(drafter="top-r", max_draft=3, name="top-1")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A $MOEXP_HOME with the tiny target and its draft experts in it."""
    home = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEXP_HOME", str(home))
        recipe = load_recipe("tiny")
        build_target(recipe, target_folder(recipe), cache=source_cache(), provenance={})
        train_draft_expert(recipe, target_folder(recipe), draft_folder(recipe), provenance={})
        yield home


@pytest.fixture
def recipe(built: Path, moexp_home: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The tiny recipe with its artifacts; runs go to the test's own home."""
    recipe = load_recipe("tiny", CHANGES)
    for kind in ("targets", "drafts"):
        (moexp_home / kind).symlink_to(built / kind)
    assert find_target(recipe).exists()
    return recipe


@pytest.fixture
def target(recipe: Recipe) -> Target:
    return open_target(recipe)


def jobs_of(target: Target, count: int = 3) -> list[Job]:
    return make_jobs(select_prompts(["chat", "math"], count)[:count], target.tokenizer)


def records(folder: Path) -> tuple[list[StepRecord], list[RequestRecord]]:
    return (
        list(read_records(folder / "steps.jsonl", StepRecord)),
        list(read_records(folder / "requests.jsonl", RequestRecord)),
    )


# --- prompts ---


def test_prompts_are_balanced_and_tuning_prompts_are_others():
    chosen = select_prompts(["chat", "math", "code"], 2)
    assert [prompt.workload for prompt in chosen] == ["chat", "math", "code"] * 2
    tuning = tuning_prompts(5)
    assert len({prompt.workload for prompt in tuning}) == 5
    assert not {prompt.id for prompt in tuning} & {prompt.id for prompt in select_prompts(["embedded"], 1000)}
    assert tuning_prompts(0) == []


# --- the engine that keeps a prompt ---


def test_a_kept_prompt_gives_the_very_same_logits(target: Target, monkeypatch: pytest.MonkeyPatch):
    prefills: list[int] = []
    whole = Engine.prefill

    def counted(self: Engine, ids: Sequence[int]) -> None:
        prefills.append(len(ids))
        whole(self, ids)

    monkeypatch.setattr(Engine, "prefill", counted)
    one, two = (list(job.prompt_ids) for job in jobs_of(target, 2))
    with opened_store(target, StoreSection(kind="resident")) as store:
        engine = PromptEngine(target, store)
        runs = []
        for ids in (one, one, two, one, one):
            digest = LogitsDigest()
            _, record = decode_all(engine, ids, TOP_1, Sampling(), max_new_tokens=12, on_cycle=digest)
            runs.append((record.tokens, digest.rows))
    assert prefills == [len(one) - 1, len(two) - 1, len(one) - 1]
    assert runs[0] == runs[1] == runs[3] == runs[4] != runs[2]


def test_a_prefill_that_was_cut_off_is_not_kept(target: Target, monkeypatch: pytest.MonkeyPatch):
    one, two = (list(job.prompt_ids) for job in jobs_of(target, 2))
    with opened_store(target, StoreSection(kind="resident")) as store:
        engine = PromptEngine(target, store, prefill_rows=8)
        wanted = decode_all(engine, one, Method(), Sampling(), max_new_tokens=6)[1].tokens
        chunks: list[int] = []
        whole = engine._run

        def cut_off(*arguments: Any) -> Any:
            chunks.append(1)
            if len(chunks) == 3:
                raise KeyboardInterrupt
            return whole(*arguments)

        monkeypatch.setattr(engine, "_run", cut_off)
        with pytest.raises(KeyboardInterrupt):
            decode_all(engine, two, Method(), Sampling(), max_new_tokens=6)
        monkeypatch.undo()
        assert decode_all(engine, one, Method(), Sampling(), max_new_tokens=6)[1].tokens == wanted


def test_a_prompt_is_copied_to_a_state_of_its_own(target: Target):
    (job,) = jobs_of(target, 1)
    with opened_store(target, StoreSection(kind="resident")) as store:
        engine = PromptEngine(target, store)
        rows = []
        for _ in range(2):
            digest = LogitsDigest()
            decode_all(engine, job.prompt_ids, TOP_1, Sampling(), max_new_tokens=8, on_cycle=digest)
            rows.append(digest.rows)
            taken_s = engine.prefill_s
            engine.activate(engine.new_state())
    assert rows[0] == rows[1] and engine.prefill_s == taken_s > 0


# --- interleaved runs ---


def run(
    target: Target, folder: Path, jobs: list[Job], methods: list[Method], slice_s: float | None = None, **hooks: Any
) -> None:
    done = begin_run(folder, {"some": "settings"})
    plan = RunPlan(jobs, methods, Sampling(), 6, slice_s=slice_s)
    with opened_store(target, StoreSection(kind="resident")) as store:
        run_methods(PromptEngine(target, store), plan, folder, done=done, **hooks)


@pytest.mark.parametrize("slice_s", [0.0, 0.01])
def test_turns_give_what_whole_answers_give_and_are_resumed(target: Target, tmp_path: Path, slice_s: float):
    methods, jobs = [Method(), TOP_1, Method(drafter="top-r", r=2, max_draft=2)], jobs_of(target, 2)
    run(target, tmp_path / "whole", jobs, methods)
    paused: list[int] = []

    def stop(complete: int) -> None:
        paused.append(complete)
        if complete == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path / "turns", jobs, methods, slice_s=slice_s, between=stop)
    assert paused == sorted(paused)
    if not slice_s:
        assert paused.count(0) > len(methods)  # before every turn
    run(target, tmp_path / "turns", jobs, methods, slice_s=slice_s)
    kept = []
    for name in ("whole", "turns"):
        steps, requests = records(tmp_path / name)
        tokens = {(one.request, one.method): one.tokens for one in requests}
        assert len(tokens) == len(requests) == 6 and len({one.request for one in requests[:3]}) == 1
        kept.append((tokens, {(one.request, one.method, one.cycle): one.tokens for one in steps}, len(steps)))
    assert kept[0] == kept[1]


def test_methods_take_turns_and_none_always_goes_first(target: Target, tmp_path: Path):
    methods = [Method(), TOP_1, Method(drafter="top-r", max_draft=1)]
    jobs = jobs_of(target, 3)
    after: list[int] = []
    run(target, tmp_path, jobs, methods, after_prompt=lambda: after.append(1))
    _, requests = records(tmp_path)
    assert [record.request for record in requests] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    labels = [method.label for method in methods]
    for place in range(3):
        turn = [record.method for record in requests[3 * place : 3 * place + 3]]
        assert turn == labels[place:] + labels[:place]
    assert len(after) == 3
    assert {record.workload for record in requests} == {"chat", "math"}
    by_prompt = {record.request: record.tokens for record in requests}
    assert all(record.tokens == by_prompt[record.request] for record in requests)


def test_an_interrupted_run_goes_on_where_it_was_and_doubles_nothing(target: Target, tmp_path: Path):
    methods, jobs = [Method(), TOP_1], jobs_of(target, 3)
    seen: list[int] = []

    def interrupt() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path, jobs, methods, after_prompt=interrupt)
    # Killed between the steps of a request and its record, and in the middle of a line.
    steps, requests = records(tmp_path)
    lines = (tmp_path / "requests.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "requests.jsonl").write_text("".join(lines[:-1]))
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"request": 2, "cyc')
    done = begin_run(tmp_path, {"some": "settings"})
    plan = RunPlan(jobs, methods, Sampling(), 6)
    assert len(done) == 3 and not plan.is_complete(done)
    run(target, tmp_path, jobs, methods)
    resumed_steps, resumed = records(tmp_path)
    assert Counter((record.request, record.method) for record in resumed) == Counter(
        (job.request, method.label) for job in jobs for method in methods
    )
    emitted: Counter[tuple[int, str]] = Counter()
    for step in resumed_steps:
        emitted[step.request, step.method] += step.emitted
    assert emitted == {(record.request, record.method): record.new_tokens for record in resumed}
    assert resumed[:3] == requests[:3]  # what was complete is kept as it was measured
    assert plan.is_complete(begin_run(tmp_path, {"some": "settings"}))


def test_records_of_other_settings_are_set_aside(target: Target, tmp_path: Path):
    jobs = jobs_of(target, 1)
    run(target, tmp_path, jobs, [Method()])
    before = (tmp_path / "steps.jsonl").read_bytes()
    assert begin_run(tmp_path, {"some": "other settings"}) == set()
    assert not (tmp_path / "steps.jsonl").exists()
    assert (tmp_path / "steps.jsonl.old").read_bytes() == before


# --- platforms ---


def test_ratios_follow_from_what_the_paper_reports():
    cg, mn = platforms.cg_ratio(), platforms.mn_ratio()
    assert (1 + cg.value) / (1 + cg.value / 6) == pytest.approx(4.7)
    assert cg.load_s(compute_s=9.0, exposed_s=2.0) == 2.0 * cg.value  # x + L is as L/x says, whatever is hidden
    assert 2.0 + mn.load_s(compute_s=9.0, exposed_s=2.0) == pytest.approx(9.0 * 14.36 / 10.18)
    assert cg.value == pytest.approx(17.08, abs=0.01) and "2.70 and 1.90" in cg.derivation
    assert mn.value == pytest.approx(0.41, abs=0.005) and "14.36 / 10.18" in mn.derivation


@pytest.mark.parametrize("name", ["paced-cg", "paced-mn"])
def test_a_paced_link_carries_an_ar_steps_bytes_in_the_time_that_the_ratio_gives(target: Target, name: str):
    platform = platforms.find_platform(name)
    probed = platforms.probe(platform, target, StoreSection(), jobs_of(target, 1)[0])
    assert platform.ratio is not None
    spec = target.spec
    assert probed["ar_bytes_per_token"] == len(spec.moe_layers) * spec.top_k * 3 * 32 * 64 * 4
    load_s = probed["ar_bytes_per_token"] / probed["bandwidth_bytes_s"][0]
    assert load_s == pytest.approx(platform.ratio.load_s(probed["compute_s"], probed["exposed_s"]))
    assert 0 < probed["exposed_s"] <= probed["compute_s"]
    section = platforms.store_section(platform, StoreSection(io_threads=3), probed["bandwidth_bytes_s"][0])
    assert section.pace is not None and section.pace.bandwidth_gb_s * 1e9 == pytest.approx(
        probed["bandwidth_bytes_s"][0]
    )
    assert (section.kind, section.policy, section.io_threads) == ("host", "none", 3)


def test_a_paced_ar_step_takes_about_its_compute_and_its_load(target: Target):
    job = jobs_of(target, 1)[0]
    platform = platforms.Platform(
        "slow", "emulated", "host", ratio=platforms.LoadRatio(10.0, "", "added"), concurrency=2
    )
    probed = platforms.probe(platform, target, StoreSection(), job)
    section = platforms.store_section(platform, StoreSection(), probed["bandwidth_bytes_s"][0])
    with opened_store(target, section) as store:
        steps, _ = decode_all(PromptEngine(target, store), job.prompt_ids, Method(), Sampling(), max_new_tokens=8)
    # Never faster than the link allows; how much slower depends on what else this machine does.
    assert min(step.cycle_s for step in steps) >= 0.9 * probed["load_s"]


def test_an_unknown_platform_or_table_names_the_valid_ones(recipe: Recipe):
    with pytest.raises(MoexpError, match="local-disk, host, paced-cg, paced-mn"):
        platforms.find_platform("phone")
    for text in ("7", "x", "1"):
        with pytest.raises(MoexpError, match="2, 3, 4, 5, 6, all"):
            bench_tables.parse_request(text, None, "draftexpert")
    requests = {text: bench_tables.parse_request(text, None, "draftexpert") for text in ("all", "4")}
    assert requests == {"all": ((2, 3, 4, 5, 6), None), "4": ((4,), None)}
    with pytest.raises(MoexpError, match="11, 12, 13, all"):
        bench_tables.run_bench(recipe, (14,), paper="ecospec")
    with pytest.raises(MoexpError, match="no paper 'nope'.*draftexpert, ecospec"):
        bench_tables.parse_request("all", None, "nope")


def test_every_platform_runs_what_its_tables_need():
    decode = load_recipe("pocket", ["decode.max_draft=5", "decode.tau=0.3", "decode.budget=44"]).decode
    by_platform = {
        name: draftexpert.methods_of(decode, platforms.find_platform(name), 6) for name in ("local-disk", "paced-cg")
    }
    disk = {method.label: method for method in by_platform["local-disk"]}
    assert list(disk) == list(METHODS)
    assert [method.label for method in by_platform["paced-cg"]] == [AR, "top-1", FIXED, TRUNCATED, FULL]
    assert all(
        disk[name].max_draft == 4 and disk[name].policy == "fixed" for name in ("top-1", "top-2", "top-3", FIXED)
    )
    for name, drafter, prefetch in (
        (TRUNCATED, "draft-expert", False),
        (FULL, "draft-expert", True),
        (TOP_1_FULL, "top-r", True),
    ):
        method = disk[name]
        assert (method.drafter, method.prefetch, method.policy) == (drafter, prefetch, "confidence-expansion")
        assert (method.max_draft, method.tau, method.budget, method.r) == (5, 0.3, 44, 1)
    few = draftexpert.methods_of(decode, platforms.find_platform("local-disk"), 2)
    assert "top-3" not in {method.label for method in few}


# --- table 5 ---


def test_losses_are_added_one_by_one_at_the_recipes_weights():
    section = load_recipe("pocket", ["draft.router.enabled=false", "draft.max_minutes=8"]).draft
    switched = {loss: ablation.with_terms(section, terms, 7) for loss, terms in ablation.TERMS_OF.items()}
    on = {loss: [name for name in ablation.TERMS if getattr(made, name).enabled] for loss, made in switched.items()}
    assert on == {
        "+ residual": ["residual"],
        "+ logit/token": ["residual", "logit", "token"],
        "+ router": ["residual", "logit", "token", "router"],
    }
    assert list(switched) == list(LOSSES[1:])
    for made in switched.values():
        assert made.steps == 7 and made.router.weight == section.router.weight
        share = (section.warmup_steps + 7) / (section.warmup_steps + section.steps)
        assert made.max_minutes == pytest.approx(8 * share)


# --- replay and the sweep ---


def cycle(confidences: list[float], accepted: int) -> Cycle:
    """Step i predicts layer-experts 10 i .. 10 i + 2 and runs the first; verification of row i needs 10 i, 10 i + 5."""
    places = range(len(confidences))
    return Cycle(
        confidences,
        [np.array([[10 * i, 10 * i + 1, 10 * i + 2]]) for i in places],
        [frozenset({10 * i}) for i in places],
        [frozenset({10 * i, 10 * i + 5}) for i in range(len(confidences) + 1)],
        accepted,
    )


def test_an_estimate_is_tokens_over_the_longer_of_drafting_and_loading_plus_verifying():
    one = [cycle([0.9, 0.2, 0.9], accepted=3)]
    free = Costs(draft_s=1.0, verify_s=2.0, load_s=0.0)
    assert estimate(one, Setting(3, 0.0, 0), free) == pytest.approx(4 / 5)
    assert estimate(one, Setting(2, 0.0, 0), free) == pytest.approx(3 / 4)
    # the second token is doubtful and brings 3 new experts: dropped at B = 2, after its draft step
    assert estimate(one, Setting(3, 0.5, 2), free) == pytest.approx(2 / 4)
    assert estimate(one, Setting(3, 0.5, 3), free) == pytest.approx(4 / 5)
    # 9 predicted in the shadow of 3 draft steps; then 4 x {10 i + 5} and row 3's own 30
    assert estimate(one, Setting(3, 0.0, 0), Costs(1.0, 2.0, 1.0)) == pytest.approx(4 / (9 + 5))
    # only the first of each three is announced: it is what drafting runs anyway, so drafting hides its loading
    assert estimate(one, Setting(3, 0.0, 0, prefetch_top=1), Costs(1.0, 2.0, 1.0)) == pytest.approx(4 / (3 + 5))
    # dropped: 6 predicted by two steps; 5 and 15 are as many as the verifier's compute hides
    assert estimate(one, Setting(3, 0.5, 2), Costs(1.0, 2.0, 1.0)) == pytest.approx(2 / (6 + 2))
    assert estimate([], Setting(3, 0.5, 2), free) == 0


def test_recorded_cycles_are_those_of_the_decoding(recipe: Recipe, target: Target):
    experts = open_draft_experts(recipe, target)
    job = jobs_of(target, 1)[0]
    method = Method(drafter="draft-expert", max_draft=3)
    with opened_store(target, StoreSection(kind="resident")) as store:
        engine = PromptEngine(target, store, draft_experts=experts)
        cycles, costs = record_cycles(engine, [job], method, max_new_tokens=12, stop_ids=frozenset())
        steps, _ = decode_all(engine, job.prompt_ids, method, Sampling(), max_new_tokens=12)
    drafted = [step for step in steps if step.drafted]
    assert [made.accepted for made in cycles] == [step.accepted for step in drafted]
    assert [len(frozenset().union(*made.drafted)) for made in cycles] == [step.unique_draft for step in drafted]
    assert [len(frozenset().union(*made.verified)) for made in cycles] == [step.unique_verify for step in drafted]
    assert costs.draft_s > 0 and costs.verify_s > 0


def test_rounds_share_the_prompts_out(target: Target):
    jobs = jobs_of(target, 3) + jobs_of(target, 2)
    assert [len(part) for part in tune.split(jobs, 3)] == [2, 2, 1]
    assert [len(part) for part in tune.split(jobs[:1], 3)] == [1]


def test_the_sweep_measures_what_looks_best_and_the_recipes_own(recipe: Recipe):
    guesses = {Setting(k, 0.5, b): k + (b > 50) / 10 for k in range(1, 8) for b in (30, 40, 60)}
    chosen = tune.shortlist(recipe, guesses)
    assert chosen[0] == Setting(7, 0.5, 60) and chosen[-1] == Setting(4, 0.5, 4)
    assert len(chosen) == tune.SHORTLIST + 1
    assert len({guesses[setting] for setting in chosen[:-1]}) == tune.SHORTLIST  # none of them twice under two names


def test_tune_writes_the_sweep_and_marks_one_choice(recipe: Recipe, tmp_path: Path):
    found = tune.run_tune(recipe, results=tmp_path)
    with open(found.table) as file:
        rows = list(csv.DictReader(file))
    assert found.table == tmp_path / "tiny" / "tune.csv"
    shown = found.table.with_suffix(".md").read_text()
    assert "chosen" in shown and "Provenance: command" in shown and "measured" in shown
    simulated = [row for row in rows if row["tag"] == "simulated"]
    assert len(simulated) == len(tune.grid(recipe)) and all(row["speedup"] == "" for row in simulated)
    (chosen,) = [row for row in rows if row["chosen"] == "yes"]
    assert (chosen["tag"], chosen["prompts"]) == ("measured", "2")
    assert rows[0]["method"] == "ar" and rows[0]["speedup"] == ""
    changed = load_recipe("tiny", found.overrides())
    assert [str(changed.decode.max_draft), str(changed.decode.budget)] == [chosen["max_draft"], chosen["budget"]]
    before = found.table.read_bytes()
    assert tune.run_tune(recipe, results=tmp_path).table.read_bytes() == before  # everything is there already


# --- end to end ---


def moexp_(*arguments: str) -> str:
    changes = [part for change in CHANGES for part in ("--set", change)]
    result = CliRunner().invoke(cli.app, [*arguments, "--recipe", "tiny", *changes], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_bench_and_report_write_the_same_tables(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    shown = moexp_("bench", "--table", "all", "--out", str(out))
    folder = Path("results/tiny/draftexpert")
    files = sorted(folder.iterdir())
    tables = [file.name for file in files if file.name.startswith("table_")]
    assert tables == sorted(f"table_{n}.{kind}" for n in range(2, 7) for kind in ("csv", "md"))
    assert folder / "figure_speedup.png" in files
    assert all(str(file) in shown for file in files)
    before = {file: file.read_bytes() for file in files}
    kept = {file: file.read_bytes() for file in out.rglob("*.jsonl")}

    for file in files:
        file.unlink()
    moexp_("report", "--out", str(out))
    assert {file: file.read_bytes() for file in sorted(folder.iterdir())} == before

    # Again: nothing is trained, decoded or measured twice.
    monkeypatch.setattr(runner, "decode_all", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(ablation, "open_setup", lambda *_: 1 / 0)
    assert "# Table 2" in moexp_("bench", "--table", "2", "--out", str(out))
    moexp_("bench", "--out", str(out))
    assert {file: file.read_bytes() for file in out.rglob("*.jsonl")} == kept
    assert {file: file.read_bytes() for file in sorted(folder.iterdir())} == before

    check_tables(folder, out)


def check_tables(folder: Path, out: Path) -> None:
    tables = {}
    for number in range(2, 7):
        with open(folder / f"table_{number}.csv") as file:
            rows = list(csv.DictReader(file))
        simulated = {row["platform"] for row in rows if row["tag"] == "simulated"}
        assert simulated == ({"cg", "mn"} if number in (2, 3, 4) else set())
        tables[number] = [row for row in rows if row["tag"] not in ("paper", "simulated")]
    platforms_ = {"local-disk": "measured", "paced-mn": "emulated"}
    assert {(row["platform"], row["tag"]) for row in tables[2]} == set(platforms_.items())
    assert {row["output"] for row in tables[2]} == {"exact"}
    assert {row["workload"] for row in tables[2]} == {"chat", "math", "mean"}
    assert all(float(row["tokens_per_s"]) > 0 for row in tables[2])
    assert {row["drafter"] for row in tables[3]} >= {"top-1", "draft-expert"}
    for row in tables[3]:
        if row["drafter"] == "draft-expert":
            assert 0 <= float(row["acceptance"]) <= 1 and float(row["cost"]) > 0 and row["acceptance_ctx"]
    full = [row for row in tables[4] if row["policy"] == "confidence-expansion+prefetch"]
    assert len(full) == 2
    for row in full:
        assert float(row["prefetch_hit"]) + float(row["prefetch_waste"]) == pytest.approx(1)
        assert float(row["verify_cost"]) > 0
    assert [row["loss"] for row in tables[5]] == list(LOSSES)
    assert all(row["kl"] and row["prefetch_hit"] for row in tables[5])
    probe = json.loads((out / "local-disk" / "probe.json").read_text())
    assert probe["compute_s"] > 0 and len(probe["bandwidth_bytes_s"]) == 2 and "direct" in probe
    assert json.loads((out / "paced-mn" / "probe.json").read_text())["derivation"]
    assert (out / "recipe.yaml").exists() and (out / "local-disk" / STEPS).exists()


def test_one_figure_is_measured_and_written_alone(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    shown = moexp_("bench", "--figure", "4", "--out", str(out))
    folder = Path("results/tiny/draftexpert")
    files = [folder / f"figure_4.{kind}" for kind in ("png", "svg", "csv")]
    assert shown.split() == [str(file) for file in files] and sorted(folder.iterdir()) == sorted(files)
    assert not (out / "ablation").exists()  # of another table
    with open(files[2]) as file:
        rows = list(csv.DictReader(file))
    assert {row["platform"] for row in rows} <= {"local-disk", "paced-mn", "resident"}
    weights = json.loads((out / "target.json").read_text())["weights"]
    stored = sum(path.stat().st_size for path in find_target(recipe).glob("*.safetensors"))
    assert 0.9 * stored < weights[0]["routed_bytes"] + weights[0]["rest_bytes"] <= stored


def test_draft_experts_that_are_not_trained_are_asked_for(recipe: Recipe, moexp_home: Path, tmp_path: Path):
    (moexp_home / "drafts").unlink()
    with pytest.raises(MoexpError, match="moexp train-draft-expert --recipe tiny"):
        bench_tables.run_bench(recipe, (2,), out=tmp_path / "run", results=tmp_path)


def test_table_6_needs_no_target(tmp_path: Path):
    files = bench_tables.run_bench(load_recipe("tiny"), (6,), results=tmp_path)
    assert [file.name for file in files] == ["table_6.csv", "table_6.md"]
    assert torch.get_num_threads() >= 1


# --- a time limit ---


def a_warm_up(method: str, tokens: int, decode_s: float, prefill_s: float = 0.0) -> RequestRecord:
    return RequestRecord(-1, "chat", method, 9, tokens, prefill_s, decode_s, "length", [1] * tokens)


def test_a_time_limit_becomes_tokens_a_prompt():
    # A prompt: 2 s of prefill, then 0.1 + 0.3 s a token of each method.
    warmed = [a_warm_up("ar", 10, 1.0, prefill_s=2.0), a_warm_up("top-1", 10, 3.0)]
    assert fitting_tokens(warmed, 5, 5 * 10.0, 48) == 20
    assert fitting_tokens(warmed, 5, 5 * 100.0, 48) == 48
    assert fitting_tokens(warmed, 5, 0.1, 48) == 4
    assert fitting_tokens(warmed, 5, 0.1, 3) == 3
    assert fitting_tokens([], 5, 0.1, 48) == 48


def test_a_run_keeps_the_tokens_it_settled_on_and_its_tables_say_so(recipe: Recipe, tmp_path: Path):
    limited = load_recipe("tiny", [*CHANGES, "bench.part_minutes=1e-6", "bench.platforms=[local-disk]"])
    asked = limited.bench.max_new_tokens
    assert asked > 4
    folder = tmp_path / "run"
    bench_tables.run_bench(limited, (2,), out=folder, results=tmp_path)
    place = folder / "local-disk"
    assert settled_tokens(place) == 4
    _, requests = records(place)
    assert {record.new_tokens for record in requests} == {4}
    lines = (place / "requests.jsonl").read_text().splitlines(keepends=True)
    (place / "requests.jsonl").write_text("".join(lines[:-1]))
    with pytest.MonkeyPatch.context() as patch:  # no second choice, however fast the machine is by now
        patch.setattr("moexp.bench.measure.fitting_tokens", lambda *_: 99)
        draftexpert.run_draftexpert(limited, [2], folder)
    assert {record.new_tokens for record in records(place)[1]} == {4} and len(records(place)[1]) == len(lines)
    bench_tables.run_bench(limited, (2,), out=folder, results=tmp_path)
    assert f"4 new tokens a prompt of the {asked} asked for" in (tmp_path / "tiny/draftexpert/table_2.md").read_text()
