from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moexp.bench import quantised
from moexp.bench.quantised import held_out_loss, held_out_rows, open_precisions, run_quantised
from moexp.cli import main as cli
from moexp.cli.stages import build_stage
from moexp.config.recipe import load_recipe
from moexp.target.load import load_target
from moexp.target.opening import find_target
from tests.tiny_models import whole_model

SMALL = ["target.dtype=float32", "bench.workloads=[chat]", "bench.max_new_tokens=6", "bench.paced_new_tokens=4"]


@pytest.fixture
def recipe():
    from rich.console import Console

    made = load_recipe("tiny", SMALL)
    build_stage(made, Console(quiet=True))
    return made


def test_held_out_loss_is_that_of_the_whole_model(recipe):
    folder = find_target(recipe)
    target = load_target(folder, dtype=torch.float32)
    rows = [row[:150] for row in held_out_rows(recipe, target)]
    nats, tokens = held_out_loss(target, rows)
    assert tokens == sum(len(row) - 1 for row in rows) > 100
    model, wanted = whole_model(folder), 0.0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            wanted += float(model(input_ids=ids, labels=ids).loss) * (len(row) - 1)
    assert math.isclose(nats, wanted / tokens, rel_tol=1e-4)


@pytest.mark.e2e
def test_every_precision_is_measured_with_its_bytes_speed_and_loss(recipe, tmp_path: Path, monkeypatch):
    files = run_quantised(recipe, results=tmp_path)
    rows = list(csv.DictReader(files[0].open()))
    assert {(row["platform"], row["tag"]) for row in rows} == {("local-disk", "measured"), ("paced-mn", "emulated")}
    for platform in ("local-disk", "paced-mn"):
        mine = [row for row in rows if row["platform"] == platform]
        assert [row["precision"] for row in mine] == [each for each in ("float32", "Q8_0", "Q4_0") for _ in range(2)]
        assert all(row["identical"] == f"{row['prompts']}/{row['prompts']}" for row in mine)
        stored, small, smallest = (float(row["bytes_per_token"]) for row in mine if row["method"] == "ar")
        assert stored > small >= smallest
        assert all(float(row["tokens_per_s"]) > 0 for row in mine)
    # AR on a cold disk reads every expert that it uses: a record each, in the packs.
    (q4,) = [row for row in rows if (row["platform"], row["precision"], row["method"]) == ("local-disk", "Q4_0", "ar")]
    target = open_precisions(recipe, padded=True)["q4_0"]
    assert float(q4["bytes_per_token"]) == target.spec.experts_per_token * target.index.stored_bytes
    losses = {row["precision"]: float(row["held_out_nats"]) for row in rows}
    assert len(set(losses.values())) == 3
    assert abs(losses["Q8_0"] - losses["float32"]) < abs(losses["Q4_0"] - losses["float32"])
    text = files[1].read_text()
    assert "Provenance: command" in text and "Q4_0" in text
    # All of it is there: run again, nothing is measured.
    monkeypatch.setattr(quantised, "run_methods", None)
    monkeypatch.setattr(quantised, "held_out_loss", None)
    before = files[0].read_text()
    run_quantised(recipe, results=tmp_path)
    assert files[0].read_text() == before


@pytest.mark.e2e
def test_a_target_that_is_not_built_is_one_error(moexp_home):
    result = CliRunner().invoke(cli.app, ["bench-quant", "--recipe", "tiny"], env={"NO_COLOR": "1"})
    assert result.exit_code == 2 and "the target is not built" in result.stderr
