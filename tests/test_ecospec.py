"""EcoSpec's tables, from training to Markdown, on the tiny target; and their arithmetic on records made by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moexp import metrics
from moexp.base.errors import MoexpError
from moexp.bench import ecospec
from moexp.cli import main as cli
from moexp.config.recipe import load_recipe
from moexp.tables.ecospec.data import load_eco_run, method_name, parts_of
from moexp.tables.ecospec.index import TABLES, build_tables

pytestmark = pytest.mark.e2e

CHANGES = [
    "head={steps: 1, rows: 2, unroll: 2, max_minutes: null}",
    "draft.held_out_rows=2",
    "bench={workloads: [chat, math], bootstrap_samples: 50, warmup_prompts: 0}",
    "ecospec={max_new_tokens: 6, gamma_sweep: [2, 4], batch_sweep: [1, 2], temperatures: [0.0, 1.0],"
    " epsilon_sweep: [10.0], prompts: 1, disk_prompts: 1, disk_new_tokens: 4}",
]


def run(*words: str) -> str:
    options = [word for change in CHANGES for word in ("--set", change)]
    result = CliRunner().invoke(cli.app, [*words, "--recipe", "tiny", *options], env={"COLUMNS": "100"})
    assert result.exit_code == 0, (words, result.output)
    return result.output


def read(path: Path) -> list[dict[str, str]]:
    with open(path) as lines:
        return list(csv.DictReader(lines))


def ours(path: Path, platform: str = "resident") -> list[dict[str, str]]:
    return [row for row in read(path) if row["tag"] != "paper" and row["platform"] == platform]


def test_labels_say_drafter_and_selection():
    assert parts_of(method_name("EAGLE-3", "EcoSpec")) == ("EAGLE-3", "EcoSpec")
    assert parts_of(method_name("MTP", "")) == ("MTP", "confidence")


def test_without_a_head_the_command_that_makes_one_is_named():
    with pytest.raises(MoexpError, match="no draft head is trained.*train-drafter"):
        ecospec.trained_heads(load_recipe("tiny", CHANGES))


def test_from_training_to_tables(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for stage in ("build-target", "train-draft-expert", "train-drafter", "train-predictor"):
        run(stage)
    out = tmp_path / "run"
    output = run("bench", "--paper", "ecospec", "--out", str(out))
    results = tmp_path / "results" / "tiny" / "ecospec"
    assert {path.name for path in results.glob("table_*.csv")} == {f"table_{n}.csv" for n in TABLES}
    assert "results/tiny/ecospec/table_1.md" in output and "results/tiny/ecospec/figure_1.png" in output
    assert {path.name for path in results.glob("*.png")} >= {"figure_1.png", "figure_gamma.png"}
    found = load_eco_run(out)

    first = ours(results / "table_1.csv")
    assert {row["temperature"] for row in first} == {"0", "1"}
    methods = {row["method"] for row in first}
    assert methods == {"ar", "EAGLE-3", "EAGLE-3 + EcoSpec", "draft-expert", "draft-expert + EcoSpec"}
    assert {row["workload"] for row in first} == {"chat", "math", "average"}
    by_hand = found.by_temperature[0.0].arms["EAGLE-3"].values()
    (average,) = [
        row for row in first if (row["method"], row["temperature"], row["workload"]) == ("EAGLE-3", "0", "average")
    ]
    assert float(average["alpha"]) == pytest.approx(
        metrics.pooled(metrics.alpha(arm.steps) for arm in by_hand).value, rel=1e-4
    )
    assert all(step.drafted <= 3 for arm in by_hand for step in arm.steps)

    model = {row["method"]: row for row in ours(results / "table_2.csv")}
    more, less = (float(model[name]["model_gb"]) for name in ("EAGLE-3", "ar"))
    assert more > less and float(model["ar"]["experts_per_layer"]) == found.target["top_k"]
    on_disk = {row["method"]: row for row in ours(results / "table_2.csv", "local-disk")}
    assert float(on_disk["ar"]["moved_gb"]) > 0 and not float(model["ar"]["moved_gb"] or 0)
    rules = {row["strategy"] for row in ours(results / "table_4.csv")}
    assert rules == {"confidence", "EcoSpec", "epsilon 10", "global"}
    time = {row["method"]: row for row in ours(results / "table_3.csv")}
    assert time["EAGLE-3 + EcoSpec"]["predictor_s"] and not time["EAGLE-3"]["predictor_s"]
    budgets = [(row["budget"], row["method"]) for row in ours(results / "table_11.csv")]
    assert sorted(budgets) == [(g, m) for g in ("2", "4") for m in ("EAGLE-3", "EAGLE-3 + EcoSpec")]
    sixth = ours(results / "table_6.csv")
    batches = {(row["batch_size"], row["method"]): row for row in sixth}
    assert {size for size, _ in batches} == {"1", "2"}
    assert float(batches["2", "ar"]["experts_per_layer"]) > float(batches["1", "ar"]["experts_per_layer"])
    assert float(batches["2", "ar"]["speedup"]) == 1
    rho = {(row["batch_size"], row["method"]): row["rho"] for row in ours(results / "table_8.csv")}
    assert float(rho["2", "ar"]) == 1 and float(rho["1", "EAGLE-3"]) > 0
    levels = ours(results / "table_9.csv")
    assert {"converged", "oracle"} <= {row["predictor"] for row in levels}
    assert next(float(row["overlap"]) for row in levels if row["predictor"] == "oracle") == 1
    oracle = [row for row in ours(results / "table_10.csv") if row["predictor"] == "oracle"]
    assert len(oracle) == 1 and not oracle[0]["speedup"]

    before = {path.name: path.read_bytes() for path in results.iterdir()}
    run("report", "--paper", "ecospec", "--out", str(out))
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before


@pytest.mark.parametrize("number", sorted(TABLES))
def test_a_table_of_nothing_still_holds_the_papers_rows(number: int, tmp_path: Path):
    tables: dict[int, Any] = {table.number: table for table in build_tables(tmp_path)}
    table = tables[number]
    assert table.rows and all(row["tag"] == "paper" for row in table.rows)
    assert all(row.keys() <= set(table.columns) for row in table.rows) or number == 13
