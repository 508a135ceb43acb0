"""The commands as a user runs them, one after another, on the tiny target."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.cli import main as cli
from moexp.cli.simulate import Simulation
from moexp.config import locations
from moexp.config.recipe import Recipe, load_recipe
from moexp.data.traces import read_trace
from moexp.learn.core.loop import Run
from moexp.learn.draft_expert import train as train_draft
from moexp.runtime.opening import method_of
from moexp.target.draft_expert import HEADER, WEIGHTS
from moexp.target.opening import find_target

pytestmark = pytest.mark.e2e

RECIPE = load_recipe("tiny")


def moexp_(*arguments: str, changes: tuple[str, ...] = ()) -> Any:
    options = [option for change in changes for option in ("--set", change)]
    return CliRunner().invoke(
        cli.app, [*arguments, "--recipe", "tiny", *options], env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    )


def done(*arguments: str, **options: Any) -> str:
    result = moexp_(*arguments, **options)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return str(result.stdout)


def refused(*arguments: str, **options: Any) -> str:
    """A mistake: exit code 2 and one line."""
    result = moexp_(*arguments, **options)
    assert result.exit_code == 2, result.output + repr(result.exception)
    line = next(line for line in result.stderr.splitlines() if line.startswith("moexp: error: "))
    assert result.stderr.rstrip().endswith(line) and "Traceback" not in result.output
    return line


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """$MOEXP_HOME after build-target, trace-routing and train-draft-expert."""
    home = tmp_path_factory.mktemp("built") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEXP_HOME", str(home))
        done("build-target")
        done("trace-routing")
        done("train-draft-expert")
    return home


@pytest.fixture
def home(built: Path, moexp_home: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of it for one test, which runs in a folder of its own."""
    shutil.copytree(built, moexp_home, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return moexp_home


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


# --- the chain ---


def test_each_stage_starts_where_the_one_before_ended(moexp_home: Path):
    assert "run: moexp build-target --recipe tiny" in refused("trace-routing")
    assert "run: moexp build-target --recipe tiny" in refused("train-draft-expert")
    assert "run: moexp build-target --recipe tiny" in refused("eval")
    assert "target: " in done("build-target")
    assert "run: moexp train-draft-expert --recipe tiny" in refused("generate", "Hello")


def test_trace_routing_prints_load_growth_and_speed_within_80_columns(home: Path, tmp_path: Path):
    shown = done("trace-routing", "--out", str(tmp_path / "trace"))
    tables, summary = shown.split("\n512 tokens of ")
    assert all(len(line) <= 80 for line in tables.splitlines())
    assert tables.splitlines()[0].split() == ["Expert", "load", "(measured)"]
    assert "block length  experts a layer  uniform  of uniform" in tables
    growth = [line.split() for line in tables.splitlines() if line.strip().startswith(tuple("12345678"))][-8:]
    assert growth[0] == ["1", "2.0", "2.0", "100%"]
    assert all(float(row[1]) < 8 for row in growth)
    assert " tokens/s (measured)" in summary
    assert read_trace(tmp_path / "trace").manifest.tokens == 512


def test_train_draft_expert_prints_each_drafters_figures(home: Path):
    shown = done("train-draft-expert")
    assert shown.startswith("trained already")
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[3:7]}
    assert set(rows) == {"top-1", "top-2", "top-3", "draft-expert"} and all(len(row) == 5 for row in rows.values())
    header = json.loads((locations.draft_folder(RECIPE) / HEADER).read_text())
    assert header["provenance"]["seed"] == 0 and header["metrics"]["draft-expert"]["tokens"] > 0


def test_finished_stages_are_left_alone(home: Path):
    before = contents(home)
    for stage in ("build-target", "trace-routing", "train-draft-expert"):
        done(stage)
    after = contents(home)
    assert {name for name in before if "traces" not in name or name.endswith(".parquet")} <= {
        name for name in after if after[name] == before.get(name)
    }


def test_eval_passes_and_writes_its_results(home: Path, tmp_path: Path):
    shown = done("eval", changes=("eval.dtypes=[float32]", "eval.prompts=1"))
    assert "exact: " in shown and "every bit as AR has it" in shown
    assert "ar, fresh engine" in shown and "draft-expert" in shown
    assert json.loads((tmp_path / "results" / "tiny" / "eval.json").read_text())["passed"] is True
    assert (tmp_path / "results" / "tiny" / "eval.csv").exists()


def test_eval_without_draft_experts_says_so_and_a_failed_gate_is_exit_code_1(home: Path, tmp_path: Path, monkeypatch):
    shutil.rmtree(locations.draft_folder(RECIPE))
    small = ("eval.dtypes=[float32]", "eval.prompts=1", "eval.max_new_tokens=6")
    shown = done("eval", "--out", str(tmp_path / "mine"), changes=small)
    assert "draft experts are not trained: left out" in shown and "draft-expert K4" not in shown
    assert (tmp_path / "mine" / "eval.csv").exists() and not (tmp_path / "results").exists()

    plain = method_of
    from moexp.runtime.verifiers import chain

    monkeypatch.setattr(chain, "verify_greedy", lambda draft, target: chain.Verdict.of_chain(len(draft), target[-1]))
    result = moexp_("eval", changes=small)
    assert result.exit_code == 1 and "FAILED: " in result.stdout and plain is method_of


def test_generate_answers_and_compares_with_ar(home: Path):
    shown = done("generate", "Why is the sky blue?")
    assert "output identical to AR's: 16 tokens, compared by id" in shown and "prefetch hit" in shown
    assert "AR" not in done("generate", "Why is the sky blue?", "--no-compare")


def test_write_corpus_writes_batches_and_keeps_those_that_are_there(home: Path, tmp_path: Path):
    arguments = ("write-corpus", "--author", "target", "--tokens", "300", "--out", str(tmp_path / "corpus"))
    assert "384 tokens by the target model in 3 batches" in done(*arguments).replace("\n", " ")
    before = contents(tmp_path / "corpus" / "000")
    done(*arguments)
    assert contents(tmp_path / "corpus" / "000") == before
    assert "another corpus is there" in refused(*arguments, changes=("draft.corpus.length=16",))
    assert "was not carved" in refused("write-corpus", "--author", "dense", "--tokens", "9")
    assert "unknown author 'me'" in refused("write-corpus", "--author", "me", "--tokens", "9")


# --- mistakes and accidents ---


@pytest.mark.parametrize("stage", ["build-target", "trace-routing", "train-draft-expert", "eval", "reproduce"])
def test_an_unknown_key_is_refused_by_every_stage(stage: str):
    assert "unknown key draft.widht" in refused(stage, changes=("draft.widht=3",))


def test_draft_experts_of_another_target_are_refused(home: Path):
    header = locations.draft_folder(RECIPE) / HEADER
    header.write_text(json.dumps(json.loads(header.read_text()) | {"target": "f" * 64}))
    for arguments in (("generate", "Hello"), ("eval",)):
        assert "draft experts of target ffffffffffff, but the target is" in refused(*arguments)
    assert "draft experts of another target are there" in refused("train-draft-expert")


def test_another_recipe_never_finds_these_artifacts(home: Path):
    assert "the target is not built" in refused("generate", "Hello", changes=("seed=1",))
    assert "the draft experts are not trained" in refused("generate", "Hello", changes=("draft.width=40",))


def test_a_truncated_shard_of_the_target_is_named(home: Path):
    shard = find_target(RECIPE) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    for arguments in (("generate", "Hello"), ("eval",)):
        assert "shard model.safetensors has" in refused(*arguments)


def test_a_truncated_shard_of_the_trace_is_refused_by_readers_and_traced_again(home: Path):
    folder = locations.trace_folder(RECIPE)
    shard = folder / "shard-00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    with pytest.raises(MoexpError, match="trace shard shard-00001.parquet has"):
        read_trace(folder)
    done("trace-routing")
    assert shard.read_bytes() == whole


@pytest.mark.parametrize("stage", ["warm_up", "distill"])
def test_training_stopped_by_ctrl_c_resumes_to_the_very_same_weights(home: Path, monkeypatch, stage: str):
    weights = locations.draft_folder(RECIPE) / WEIGHTS
    whole = weights.read_bytes()
    shutil.rmtree(weights.parent)
    shutil.rmtree(locations.draft_work(RECIPE))
    running = getattr(train_draft, stage)

    def interrupted(path: Any, corpus_NL: Any, settings: Any, run: Run) -> None:
        def watch(step: int, metrics: dict[str, float]) -> None:
            run.on_step(step, metrics)
            os.kill(os.getpid(), signal.SIGINT)

        running(path, corpus_NL, settings, dataclasses.replace(run, on_step=watch))

    with monkeypatch.context() as patch:
        patch.setattr(train_draft, stage, interrupted)
        result = moexp_("train-draft-expert")
    assert result.exit_code == 130 and "To resume, run again: moexp" in result.stderr
    assert not weights.exists() and list(locations.draft_work(RECIPE).glob("state/*/state.safetensors"))
    done("train-draft-expert")
    assert weights.read_bytes() == whole
    assert not (locations.draft_work(RECIPE) / "state").exists()


def test_a_full_disk_ends_training_in_one_line_and_loses_nothing(home: Path, monkeypatch):
    weights = locations.draft_folder(RECIPE) / WEIGHTS
    whole = weights.read_bytes()
    shutil.rmtree(weights.parent)

    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("moexp.target.trained.save_file", full)
        assert "disk full, nothing was changed" in refused("train-draft-expert")
    assert not weights.parent.exists()
    done("train-draft-expert")
    assert weights.read_bytes() == whole


# --- reproduce ---


@pytest.fixture
def no_tables(monkeypatch) -> list[Any]:
    from moexp.bench import papers as bench_tables

    asked: list[Any] = []

    def run_bench(recipe: Recipe, tables: Collection[int], *, paper: str = "draftexpert") -> list[Path]:
        asked.append((paper, tuple(tables)))
        return [Path(f"{paper}/table_2.md")]

    monkeypatch.setattr(bench_tables, "run_bench", run_bench)
    return asked


def test_reproduce_runs_every_stage_in_order_and_skips_what_is_done(home: Path, tmp_path: Path, no_tables: list[Any]):
    small = ("eval.dtypes=[float32]", "eval.prompts=1", "eval.max_new_tokens=6", "bench.tables=[2, 6]")
    shown = done("reproduce", changes=small)
    places = [shown.index(f"{number}/7 {name}") for number, name in enumerate(
        ("build-target", "trace-routing", "train-draft-expert", "eval", "bench", "audit", "report"), start=1
    )]  # fmt: skip
    assert places == sorted(places) and no_tables == [("draftexpert", (2, 6))]
    assert (
        shown.index("done in 0:") > places[-1]
        and "results: results/tiny" in shown
        and "table: draftexpert/table_2.md" in shown
        and "report: results/tiny/report.html" in shown
    )
    stamp = (tmp_path / "results" / "tiny" / "eval.json").stat().st_mtime_ns
    assert "passed already" in done("reproduce", changes=small)
    assert (tmp_path / "results" / "tiny" / "eval.json").stat().st_mtime_ns == stamp


def test_reproduce_goes_on_to_the_other_paper_where_its_tables_are_named(home: Path, no_tables: list[Any]):
    small = ("eval.dtypes=[float32]", "eval.prompts=1", "eval.max_new_tokens=6", "bench.tables=[2]")
    heads = "head={steps: 1, rows: 2, unroll: 2, max_minutes: null}"
    shown = done("reproduce", changes=(*small, heads, "ecospec={heads: [eagle3, mtp], tables: [1, 13]}"))
    names = (
        "6/10 train-drafter", "7/10 train-predictor", "8/10 bench --paper ecospec", "9/10 audit", "10/10 report",
    )  # fmt: skip
    places = [shown.index(name) for name in names]
    assert places == sorted(places) and no_tables == [("draftexpert", (2,)), ("ecospec", (1, 13))]
    assert "eagle3 on held-out text" in shown and "mtp on held-out text" in shown
    assert "table: ecospec/table_2.md" in shown


def test_reproduce_simulates_what_was_recorded(home: Path, no_tables: list[Any], monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(
        "moexp.sim.calibration.calibrate.calibrate_stage", lambda recipe, console: calls.append("calibrate")
    )

    def simulated(recipe: object, flags: Simulation) -> list[Path]:
        calls.append(flags)
        return [Path("simulated.md")]

    monkeypatch.setattr("moexp.cli.simulate.run_simulate", simulated)
    small = ("eval.dtypes=[float32]", "eval.prompts=1", "eval.max_new_tokens=6", "bench.tables=[2, 3]")
    shown = done("reproduce", changes=small)
    platforms = [Simulation(platform=name) for name in ("cg", "mn", "this-machine")]
    sweeps = [Simulation(sweep=name) for name in ("bandwidth", "cache")]
    assert calls == ["calibrate", Simulation(validate=True), *platforms, *sweeps]
    assert "6/9 calibrate" in shown and "7/9 simulate" in shown and "report: simulated.md" in shown


def test_reproduce_fails_where_the_audit_finds_our_results_at_odds(home: Path, no_tables: list[Any], monkeypatch):
    from moexp.audit import Audit

    monkeypatch.setattr(Audit, "inconsistent", property(lambda self: ["a line"]))
    small = ("eval.dtypes=[float32]", "eval.prompts=1", "eval.max_new_tokens=6", "bench.tables=[2]")
    result = moexp_("reproduce", changes=small)
    assert result.exit_code == 1 and "of ours inconsistent: 1" in result.stdout and "report.html" in result.stdout


def test_reproduce_makes_no_tables_of_methods_that_are_not_exact(home: Path, no_tables: list[Any], monkeypatch):
    from moexp.bench import gate as evaluate
    from moexp.bench.exactness import Gate, Mismatch, Outcome

    bad = Outcome("float32", "disk", "plain", "m", apart=[Mismatch("p", 0, 1.0)])
    monkeypatch.setattr(evaluate, "run_gate", lambda recipe, tokens: Gate((bad,), {"float32": True}, 0.01))
    result = moexp_("reproduce")
    assert result.exit_code == 1 and "FAILED: 1 of 1 methods" in result.stdout and no_tables == []


@pytest.mark.parametrize("change", ["bench.tables=[2, 7]", "ecospec.tables=[1, 14]"])
def test_reproduce_knows_its_tables_before_it_starts(home: Path, change: str):
    result = moexp_("reproduce", changes=(change,))
    assert result.exit_code == 2 and change.split("=")[0] in result.stderr and "build-target" not in result.stdout


@pytest.mark.slow
def test_reproduce_from_nothing_with_all_tables(moexp_home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done("reproduce")
    tables = {file.name for file in (tmp_path / "results" / "tiny" / "draftexpert").glob("table_*.csv")}
    assert tables == {f"table_{number}.csv" for number in range(2, 7)}
