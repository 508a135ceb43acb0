from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.base.provenance import collect_provenance, git_state, versions
from moexp.config.locations import artifact_path, home
from moexp.config.recipe import load_recipe
from moexp.config.run_folder import RunDir

REPO = Path(__file__).parent.parent


def test_home_is_the_variable_or_the_users_cache(moexp_home: Path, monkeypatch):
    assert home() == moexp_home
    monkeypatch.setenv("MOEXP_HOME", "")
    monkeypatch.setenv("HOME", "/somebody")
    assert home() == Path("/somebody/.cache/moexp")


def test_an_artifacts_folder_depends_on_the_sections_it_is_made_from(moexp_home: Path):
    one, other = load_recipe("tiny"), load_recipe("tiny", ["draft.width=8"])
    assert artifact_path("targets", one, "target") == artifact_path("targets", other, "target")
    assert artifact_path("drafts", one, "draft") != artifact_path("drafts", other, "draft")
    assert artifact_path("targets", one, "target").parent == moexp_home / "targets"


def test_a_run_folder_keeps_recipe_and_provenance_of_every_invocation(tmp_path: Path):
    path, recipe = tmp_path / "deep" / "run", load_recipe("tiny", ["seed=5"])
    with RunDir(path, recipe, ["bench", "--recipe", "my recipe"]):
        pass
    with RunDir(path, recipe, ["bench"]):
        pass
    assert load_recipe(path / "recipe.yaml") == recipe
    first, second = json.loads((path / "provenance.json").read_text())["invocations"]
    assert first["command"] == "moexp bench --recipe 'my recipe'"
    assert second["command"] == "moexp bench"
    assert first["seed"] == 5
    assert first["hardware"]["cores"] >= 1 and first["hardware"]["memory_gib"] > 0
    assert set(first["versions"]) >= {"python", "moexp", "torch", "transformers", "datasets"}
    assert set(first["git"]) == {"commit", "dirty"}


def test_a_finished_stage_is_known_by_its_digest(tmp_path: Path):
    recipe = load_recipe("tiny")
    with RunDir(tmp_path, recipe) as run:
        assert run.result("trace", "abc") is None
        run.mark_done("trace", "abc", {"tokens": 3})
        run.mark_done("eval", "abc")
    with RunDir(tmp_path, recipe) as run:
        assert run.result("trace", "abc") == {"tokens": 3}
        assert run.result("eval", "abc") == {}  # done with nothing to say is done all the same
        assert run.result("trace", "other") is None


def test_two_runs_do_not_share_a_folder(tmp_path: Path):
    recipe = load_recipe("tiny")
    with RunDir(tmp_path, recipe):
        before = (tmp_path / "provenance.json").read_text()
        with (
            pytest.raises(MoexpError, match=f"process {os.getpid()}. is using this folder"),
            RunDir(tmp_path, recipe),
        ):
            pass
        assert (tmp_path / "provenance.json").read_text() == before
    with RunDir(tmp_path, recipe):
        pass


def test_the_lock_of_a_killed_run_is_free_and_its_leftovers_go(tmp_path: Path):
    script = f"""
import os, signal
from pathlib import Path
from moexp.config.recipe import load_recipe
from moexp.config.run_folder import RunDir
from moexp.base import atomic
with RunDir(Path({str(tmp_path)!r}), load_recipe("tiny")) as run:
    run.mark_done("first", "d", {{"kept": True}})
    os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    run.mark_done("second", "d")
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".tmp-*"))
    with RunDir(tmp_path, load_recipe("tiny")) as run:
        assert not list(tmp_path.glob(".tmp-*"))
        assert run.result("first", "d") == {"kept": True}
        assert run.result("second", "d") is None


def test_a_failure_while_opening_gives_the_lock_up(tmp_path: Path, monkeypatch):
    def refuse(path: Path, text: str) -> None:
        raise MoexpError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_text", refuse)
        with pytest.raises(MoexpError, match="disk full"), RunDir(tmp_path, load_recipe("tiny")):
            pass
    with RunDir(tmp_path, load_recipe("tiny")):
        pass


def test_a_file_in_the_folders_place_and_a_damaged_marker_are_errors(tmp_path: Path):
    file = tmp_path / "results.json"
    file.write_text("{}")
    with pytest.raises(MoexpError, match="a file stands where"), RunDir(file, load_recipe("tiny")):
        pass
    with RunDir(tmp_path / "run", load_recipe("tiny")) as run:
        (run.path / "trace.done.json").write_text("{")
        with pytest.raises(MoexpError, match=r"not readable as JSON.*trace\.done\.json.*remove it"):
            run.result("trace", "abc")


# --- provenance ---


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_git_state_speaks_of_the_code_only(tmp_path: Path):
    git(tmp_path, "init")
    (tmp_path / "moexp").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "moexp" / "a.py").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = git_state(tmp_path)
    assert clean["dirty"] is False and len(clean["commit"]) == 40
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("")
    assert git_state(tmp_path) == clean
    (tmp_path / "moexp" / "b.py").write_text("")  # not even added, yet imported
    assert git_state(tmp_path) == {**clean, "dirty": True}


def test_a_commit_of_somebody_elses_repository_is_not_ours(tmp_path: Path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "theirs")
    nothing = {"commit": None, "dirty": None}
    assert git_state(tmp_path) == nothing  # a repository, but not a clone of this project
    inside = tmp_path / "vendor" / "moexp"
    inside.mkdir(parents=True)
    assert git_state(inside) == nothing
    (inside / "pyproject.toml").write_text("")  # a copy of this project in a larger repository
    assert git_state(inside) == nothing


def test_a_missing_package_has_no_version(monkeypatch):
    monkeypatch.setattr("moexp.base.provenance._PACKAGES", ("no-such-package",))
    assert versions()["no-such-package"] is None


def test_provenance_is_plain_json_and_imports_no_torch():
    assert json.loads(json.dumps(collect_provenance(0, []))) is not None
    script = (
        "import sys, moexp.config.run_folder, moexp.metrics, moexp.papers, moexp.cli.app; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "False"
