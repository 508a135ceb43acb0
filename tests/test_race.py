"""`moexp race`: methods of several recipes in turns over one store, each with what it was trained for."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.bench.race import check_recipes, digest_of, parts_of, race_platform, run_race
from moexp.cli import main as cli
from moexp.config.locations import home
from moexp.config.recipe import Recipe, load_method, load_recipe, recipe_folders

pytestmark = pytest.mark.e2e

BASE = """
base: tiny
head: {steps: 1, rows: 2, unroll: 2, kind: mtp}
draft: {held_out_rows: 2}
bench: {workloads: [chat, math], bootstrap_samples: 50, warmup_prompts: 0}
"""
RECIPES = {
    "chain": BASE,
    "eager": "decode: {policy: fixed, prefetch_top: 1}\n",  # no base: laid over the first
    "tree": "base: chain.yaml\ndecode: {drafter: head, prefetch: true, tree: {predictor: learned, gamma: 4}}\n",
}


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Three methods of one target; the working folder is theirs."""
    monkeypatch.chdir(tmp_path)
    for name, content in RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    return [load_method(f"{name}.yaml", base="chain.yaml") for name in RECIPES]


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "100"})
    assert result.exit_code == code, (words, result.output)
    return result.output


def read(path: Path) -> dict[str, dict[str, str]]:
    with open(path, newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_each_method_decodes_what_ar_does_and_is_measured_beside_it(recipes: list[Recipe], tmp_path: Path):
    for stage in ("build-target", "train-draft-expert", "train-drafter", "train-predictor"):
        run(stage, "--recipe", "chain.yaml")
    words = [f"{name}.yaml" for name in RECIPES]
    output = run("race", *words, "--tokens", "6", "--name", "first")
    folder = tmp_path / "results" / "chain" / "races"
    names = {"first.csv", "first.md", "figure_first.png", "figure_first.svg", "figure_first.csv"}
    assert {path.name for path in folder.iterdir()} == names
    assert "# Race on local-disk" in output and "results/chain/races/first.md" in output
    rows = read(folder / "first.csv")
    assert list(rows) == ["ar", "chain", "eager", "tree"]
    assert {(row["output"], row["identical"], row["tag"]) for row in rows.values()} == {("exact", "2/2", "measured")}
    assert not rows["ar"]["speedup"] and all(float(rows[name]["speedup"]) > 0 for name in RECIPES)
    assert rows["eager"]["settings"] == "draft-expert K4 prefetch1"
    assert rows["tree"]["settings"] == "head tree 3x2x2 gamma4 marginal-cost prefetch"
    assert float(rows["ar"]["experts_per_layer"]) == 2 < float(rows["tree"]["experts_per_layer"])
    assert rows["tree"]["prefetch_hit"] and not rows["ar"]["prefetch_hit"]

    # Nothing is measured twice; another place is another run.
    (records,) = home().glob("races/*/*/local-disk/requests.jsonl")
    assert len(records.read_text().splitlines()) == 2 * 4
    before, table = records.read_bytes(), (folder / "first.csv").read_bytes()
    run("race", *words, "--tokens", "6", "--name", "first")
    assert (records.read_bytes(), (folder / "first.csv").read_bytes()) == (before, table)
    run("race", "tree.yaml", "--platform", "resident", "--tokens", "4")
    alone = read(tmp_path / "results" / "tree" / "races" / "race.csv")
    assert list(alone) == ["ar", "tree"] and alone["tree"]["platform"] == "resident"
    assert len(list(home().glob("races/*/*/*/requests.jsonl"))) == 2

    # Other weights of the same settings are another run, too.
    old = digest_of(recipes)
    header = parts_of(recipes[2])["predictor"]
    assert json.loads(next(header.glob("*.json")).read_text())
    weights = next(header.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes() + b" ")
    assert digest_of(recipes) != old


def test_who_cannot_race_is_told_why(recipes: list[Recipe], tmp_path: Path):
    run("build-target", "--recipe", "chain.yaml")
    chain = recipes[0]
    with pytest.raises(MoexpError, match="two methods called chain"):
        check_recipes([chain, chain])
    with pytest.raises(MoexpError, match="two methods called ar"):
        check_recipes([chain.model_copy(update={"name": "ar"})])
    warm = load_recipe("tree.yaml", ["decode.temperature=1.0"])
    with pytest.raises(MoexpError, match="another sampling than the first recipe's.*temperature=0.0"):
        check_recipes([chain, warm])
    other = load_recipe("tree.yaml", ["seed=1"])
    with pytest.raises(MoexpError, match="the target is not built"):
        check_recipes([chain, other])
    elsewhere = load_recipe("tree.yaml", [f"paths.target={tmp_path / 'elsewhere'}"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    with pytest.raises(MoexpError, match="another target than the first recipe's"):
        check_recipes([chain, elsewhere])
    with pytest.raises(MoexpError, match="moon"):
        run_race([chain], platform="moon")
    with pytest.raises(MoexpError, match="the draft experts are not trained"):
        run_race([chain], platform="resident", tokens=2)
    assert "not trained" in run("race", "tree.yaml", "--tokens", "2", code=2)


def test_where_a_race_is_run(recipes: list[Recipe]):
    chain = recipes[0]
    assert race_platform(None, chain).name == "local-disk" and race_platform("paced-cg", chain).paced
    assert race_platform("resident", chain).kind == "resident"
    nowhere = load_recipe("chain.yaml", ["bench.platforms=[]"])
    with pytest.raises(MoexpError, match="no platform to race on"):
        race_platform(None, nowhere)


def test_a_method_is_laid_over_a_recipe_and_a_recipe_is_not(recipes: list[Recipe], tmp_path: Path):
    chain, eager, tree = recipes
    assert (eager.name, eager.target, eager.head) == ("eager", chain.target, chain.head)
    assert eager.decode.policy == "fixed" and eager.decode.budget == chain.decode.budget
    assert load_method("tree.yaml", base="tiny") == tree  # it names its own base
    assert load_method("chain.yaml", base="chain.yaml") == chain
    (tmp_path / "odd.yaml").write_text("decode: {drafer: head}\n")
    with pytest.raises(MoexpError, match="unknown key decode.drafer.*odd.yaml"):
        load_method("odd.yaml", base="chain.yaml")
    with pytest.raises(MoexpError, match="no recipe or method 'mtp-wid'.*did you mean mtp-wide"):
        load_method("mtp-wid", base="chain.yaml")


def test_every_shipped_method_suits_a_shipped_recipe():
    files = sorted((recipe_folders()[0] / "methods").glob("*.yaml"))
    assert files
    for file in files:
        method = load_method(file.stem, base="pocket-qwen3")
        assert method.summary and method.target == load_recipe("pocket-qwen3").target
