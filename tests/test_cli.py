from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import moexp
from moexp.base.errors import MoexpError
from moexp.cli import main as cli
from moexp.cli.app import command
from moexp.cli.group import CommandGroup
from moexp.config.recipe import load_recipe

REPO = Path(__file__).parent.parent
FLAGS = {
    "recipes": set(),
    "show-recipe": {"--recipe", "-r", "--set", "-s"},
    "build-target": {"--recipe", "-r", "--set", "-s", "--out", "-o"},
    "trace-routing": {"--recipe", "-r", "--text", "--set", "-s", "--out", "-o"},
    "train-draft-expert": {"--recipe", "-r", "--set", "-s", "--out", "-o"},
    "train-predictor": {"--recipe", "-r", "--set", "-s", "--out", "-o"},
    "train-drafter": {"--recipe", "-r", "--set", "-s"},
    "generate": {"text", "--recipe", "-r", "--compare", "--show-tree", "--set", "-s"},
    "eval": {"--recipe", "-r", "--tokens", "--set", "-s", "--out", "-o"},
    "write-corpus": {"--author", "--tokens", "--recipe", "-r", "--set", "-s", "--out", "-o"},
    "reproduce": {"--recipe", "-r", "--set", "-s"},
    "bench": {"--recipe", "-r", "--table", "-t", "--figure", "--paper", "--set", "-s", "--out", "-o"},
    "tune": {"--recipe", "-r", "--set", "-s", "--out", "-o"},
    "platforms": set(),
    "bench-quant": {"--recipe", "-r", "--set", "-s", "--out", "-o"},
    "cache-budgets": {"--recipe", "-r", "--prompts", "--tokens", "--set", "-s"},
    "pack": {"--recipe", "-r", "--quant", "-q", "--set", "-s", "--out", "-o"},
    "calibrate": {"--recipe", "-r", "--set", "-s", "--out", "-o"},
    "simulate": {
        "--recipe",
        "-r",
        "--platform",
        "-p",
        "--recording",
        "--trace",
        "--accept",
        "--sweep",
        "--validate",
        "--set",
        "-s",
        "--out",
        "-o",
    },
    "report": {"--recipe", "-r", "--paper", "--set", "-s", "--out", "-o"},
    "audit": {"--recipe", "-r", "--set", "-s", "--out", "-o"},
    "plan": {"--recipe", "-r", "--platform", "-p", "--set", "-s"},
    "compare": {"recipes", "--out", "-o"},
    "race": {"recipes", "--platform", "-p", "--prompts", "--tokens", "--name"},
}


def moexp_(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def commands() -> dict[str, Any]:
    return typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def test_flags_are_few_and_change_only_on_purpose():
    found = {name: {flag for option in command.params for flag in option.opts} for name, command in commands().items()}
    assert found == FLAGS


@pytest.mark.parametrize("name", FLAGS)
def test_every_command_explains_itself_with_an_example(name: str):
    result = moexp_(name, "--help")
    assert result.exit_code == 0
    assert f"Example: moexp {name}" in result.output


def test_examples_name_flags_that_exist():
    for name, found in commands().items():
        flags = {flag for option in found.params for flag in option.opts}
        words = found.epilog.removeprefix("Example: ").split()
        assert words[:2] == ["moexp", name]
        assert {word for word in words if word.startswith("-")} <= flags


def test_recipes_are_listed_a_line_each():
    result = CliRunner().invoke(cli.app, ["recipes"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    lines = result.output.strip().splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names == sorted(names) and {"ds-v2-lite", "pocket", "pocket-quick", "tiny"} <= set(names)


def test_a_shown_recipe_can_be_used_as_one(tmp_path: Path):
    result = moexp_("show-recipe", "--recipe", "tiny", "--set", "draft.width=8", "-s", "seed=3")
    path = tmp_path / "mine.yaml"
    path.write_text(result.stdout)
    assert load_recipe(path) == load_recipe("tiny", ["draft.width=8", "seed=3"])


def test_an_unknown_key_is_one_line_with_the_nearest_name_and_exit_code_2():
    result = moexp_("show-recipe", "--set", "draft.widht=3")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("moexp: error: unknown key draft.widht")
    assert "draft.width" in result.stderr


def test_version_and_no_arguments():
    assert moexp_("--version").output.strip() == f"moexp {moexp.__version__}"
    assert "show-recipe" in moexp_().output
    assert moexp_("nonsense").exit_code == 2


def app_with(function: Any) -> typer.Typer:
    app = typer.Typer(cls=CommandGroup)
    app.callback()(lambda: None)
    command(app, "run", "moexp run")(function)
    return app


def test_an_error_of_several_lines_is_shown_as_one():
    def run() -> None:
        raise MoexpError("first\nsecond", where="there")

    result = CliRunner().invoke(app_with(run), ["run"])
    assert (result.exit_code, result.stderr) == (2, "moexp: error: first second (there)\n")


def test_an_interruption_says_how_to_resume(monkeypatch):
    def run() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["moexp", "run", "--set", "a.b=[1, 2]"])
    result = CliRunner().invoke(app_with(run), ["run"])
    assert result.exit_code == 130
    assert "run again: moexp run --set 'a.b=[1, 2]'" in result.stderr


def test_a_bug_is_not_hidden():
    def run() -> None:
        raise RuntimeError("a bug")

    result = CliRunner().invoke(app_with(run), ["run"])
    assert isinstance(result.exception, RuntimeError)


def test_ctrl_c_in_a_real_process_ends_with_130_and_no_traceback():
    script = """
import signal, sys
import typer
from moexp.cli import main as cli
from moexp.cli.app import command
def wait() -> None:
    print("ready", flush=True)
    signal.pause()
command(cli.app, "wait", "moexp wait")(wait)
sys.argv = ["moexp", "wait"]
cli.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "run again: moexp wait" in errors and "Traceback" not in errors


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "moexp", "show-recipe", "--recipe", "nowhere"],
        capture_output=True,
        text=True,
        cwd=REPO,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("moexp: error: no recipe 'nowhere'") and "Traceback" not in done.stderr
