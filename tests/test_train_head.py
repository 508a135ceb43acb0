"""`train-drafter` on the tiny recipe, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moexp.cli import main as cli
from moexp.config.locations import head_folder, with_head
from moexp.config.recipe import load_recipe

pytestmark = pytest.mark.e2e

FEW = ["head={steps: 2, rows: 2, unroll: 2, max_minutes: null}", "draft.held_out_rows=2"]


def run(*changes: str) -> str:
    options = [word for change in (*FEW, *changes) for word in ("--set", change)]
    result = CliRunner().invoke(cli.app, ["train-drafter", "--recipe", "tiny", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "gto"])
def test_a_head_is_trained_measured_kept_and_not_trained_again(kind: str):
    assert CliRunner().invoke(cli.app, ["build-target", "--recipe", "tiny"]).exit_code == 0
    changes = [f"head.kind={kind}", *(["head.draft_vocab=128"] if kind != "mtp" else [])]
    output = run(*changes)
    assert "draft step" in output and "acceptance" in output
    recipe = load_recipe("tiny", [*FEW, *changes])
    folder = head_folder(recipe)
    (header_file,) = [file for file in folder.iterdir() if file.name in ("moexp_head.json", "mtp_head.json")]
    header = json.loads(header_file.read_text())
    assert header["kind"] == kind and 0 <= header["metrics"]["acceptance_2"] <= 1
    assert len(header["training"]["log"]) == 2 and "acceptance_1" in header["training"]["log"][0]
    if kind == "gto":
        assert Path(header["start"]) == head_folder(with_head(recipe, "eagle3"))
        assert "reward" in header["training"]["log"][0]
    assert "trained already" in run(*changes)
