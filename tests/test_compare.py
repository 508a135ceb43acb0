"""`moexp compare`: several recipes' Table 1 in one, the paper's figures beside those of the same geometry."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.cli.main import app
from moexp.papers import load_paper
from moexp.tables.core.table import Row
from moexp.tables.ecospec.compare import COLUMNS, FOLDER, compare
from moexp.tables.ecospec.tables_1_and_13 import counterpart, paper_beside, plain_name

PAPER = load_paper("ecospec")
QWEN, GPT, DEEPSEEK = "Qwen3-235B-A22B", "GPT-OSS-120B", "DeepSeek-V3.1"


@pytest.mark.parametrize(
    "experts, top_k, model", [(128, 8, QWEN), (128, 4, GPT), (256, 8, DEEPSEEK), (64, 6, None), (256, 4, None)]
)
def test_a_target_stands_for_the_papers_of_the_same_geometry(experts: int, top_k: int, model: str | None):
    assert counterpart({"num_experts": experts, "top_k": top_k}) == model


@pytest.mark.parametrize(
    "model, method, temperature, workload, speedup, alpha, union",
    [
        (QWEN, "EAGLE-3", 0.0, "average", 1.22, 2.41, 23.7),
        (QWEN, "EAGLE-3 + EcoSpec", 0.0, "mt-bench", 1.62, 2.44, 19.9),
        (QWEN, "EAGLE-3 + EcoSpec", 1.0, "average", 1.38, 2.36, 20.9),
        (DEEPSEEK, "MTP", 0.0, "average", 1.10, 2.85, 31.4),
        (DEEPSEEK, "MTP + EcoSpec", 0.0, "average", 1.15, 2.79, 31.2),
    ],
)
def test_the_papers_figures_stand_beside_the_same_method(model, method, temperature, workload, speedup, alpha, union):
    row: Row = {"method": method, "temperature": temperature, "workload": workload}
    beside = {"paper_model": model, "paper_speedup": speedup, "paper_alpha": alpha, "paper_E": union}
    assert paper_beside(row, model) == beside


@pytest.mark.parametrize(
    "model, method, temperature, workload",
    [
        (None, "EAGLE-3", 0.0, "average"),
        (QWEN, "ar", 0.0, "average"),
        (QWEN, "MTP", 0.0, "average"),  # the paper has it of another target
        (QWEN, "MTP + EcoSpec", 0.0, "average"),  # its EcoSpec is on EAGLE-3 here
        (QWEN, "EAGLE-3 + oracle", 0.0, "average"),
        (QWEN, "EAGLE-3", 0.7, "average"),
        (QWEN, "EAGLE-3", 0.0, "chat"),
    ],
)
def test_other_rows_have_nothing_beside_them(model, method, temperature, workload):
    assert paper_beside({"method": method, "temperature": temperature, "workload": workload}, model) == {}


def test_names_of_workloads_are_compared_without_case_and_punctuation():
    assert plain_name("Math500") == plain_name("math-500") == "math500" and plain_name("mt-bench") == plain_name(
        "MTBench"
    )


def write(results: Path, name: str, rows: list[Row], cheapest: float | None = None) -> None:
    folder = results / name / "ecospec"
    folder.mkdir(parents=True)
    with open(folder / "table_1.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({"model": name, "platform": "resident", "tag": "measured", "prompts": 2} | row for row in rows)
    if cheapest is not None:
        columns = "platform,method,predictor,tag,experts_per_layer"
        (folder / "table_10.csv").write_text(f"{columns}\nresident,EAGLE-3 + cheapest,cheapest,measured,{cheapest}\n")


def averages(temperature: int, *, plain: float, chosen: float, model: str | None = None) -> list[Row]:
    rows: list[Row] = [
        {"method": "ar", "alpha": 1, "E": 8},
        {"method": "EAGLE-3", "speedup": 0.9, "alpha": 2.0, "E": plain},
        {"method": "EAGLE-3 + EcoSpec", "speedup": 0.95, "alpha": 1.9, "E": chosen},
    ]
    same: Row = {"temperature": temperature, "workload": "average", "uniform": 29.1}
    return [same | row | paper_beside(same | row, model) for row in rows]


def test_one_table_holds_every_models_rows_and_what_marginal_cost_saves(tmp_path: Path):
    results = tmp_path / "results"
    write(results, "alike", averages(0, plain=25.0, chosen=22.0, model=QWEN), cheapest=20.0)
    write(results, "other", averages(0, plain=10.0, chosen=9.5) + averages(1, plain=12.0, chosen=12.0))
    files = compare(["alike", "other"], results)
    assert [path.name for path in files] == [
        "table_1.csv", "table_1.md", "figure_targets.png", "figure_targets.svg", "figure_targets.csv"
    ]  # fmt: skip
    assert {path.parent for path in files} == {results / FOLDER}
    with open(files[0], newline="") as file:
        rows = list(csv.DictReader(file))
    mine = [row for row in rows if row["tag"] != "paper"]
    assert [(row["model"], row["method"], row["E"]) for row in mine[:3]] == [
        ("alike", "ar", "8"), ("alike", "EAGLE-3", "25"), ("alike", "EAGLE-3 + EcoSpec", "22")
    ]  # fmt: skip
    assert len(mine) == 9 and mine[1]["paper_E"] == "23.7" and not mine[4]["paper_E"]
    assert len(rows) - len(mine) == len(PAPER.table(1).rows)
    page = files[1].read_text()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    assert ["alike", "resident", "0", "EAGLE-3", "12.0%", "20.0%", "13.5%", "5.0%", "3.7%"] in cells
    assert ["other", "resident", "0", "EAGLE-3", "5.0%", "-", "-", "5.0%", "-"] in cells
    assert ["other", "resident", "1", "EAGLE-3", "0.0%", "-", "-", "5.0%", "-"] in cells
    assert ["alike", "EAGLE-3", "0.90", "1.22", "2.00", "2.41", "25.00", "23.70", "29.10"] in cells
    assert "Put together by: command" in " ".join(page.split())
    before = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in compare(["alike", "other"], results)] == before


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "results", "one", averages(0, plain=10.0, chosen=9.0))
    found = CliRunner().invoke(app, ["compare", "one", "two"])
    assert found.exit_code == 2 and "no EcoSpec Table 1 of ours" in found.output
    assert "moexp bench --paper ecospec --table 1 --recipe two" in " ".join(found.output.split())
    with pytest.raises(MoexpError, match="one is named twice"):
        compare(["one", "one"], tmp_path / "results")
    path = tmp_path / "results" / "one" / "ecospec" / "table_1.csv"
    path.write_text(path.read_text().replace("9.0", "nine"))
    with pytest.raises(MoexpError, match="not a number: .*nine"):
        compare(["one"], tmp_path / "results")
    path.write_text(path.read_text().replace("model,platform", "target,platform"))
    with pytest.raises(MoexpError, match="no column 'model'"):
        compare(["one"], tmp_path / "results")
    assert not (tmp_path / "results" / FOLDER).exists()
