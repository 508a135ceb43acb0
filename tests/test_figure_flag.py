"""`moexp bench --figure`: what a figure needs is measured, and the figure is written alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.bench.papers import parse_request, run_bench
from moexp.cli import main as cli
from moexp.config.locations import trace_folder
from moexp.config.recipe import load_recipe
from moexp.tables.write import FIGURES, TABLES
from tests.test_draft_figures import folder, steps
from tests.test_figures import trace

pytestmark = pytest.mark.e2e


__all__ = ["folder", "steps", "trace"]  # fixtures


def moexp_(*words: str) -> Any:
    return CliRunner().invoke(cli.app, [*words, "--recipe", "tiny", "--set", "bench.bootstrap_samples=5"])


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_names_the_tables_whose_runs_it_needs(paper: str):
    assert all(set(needs) <= set(TABLES[paper]) for needs in FIGURES[paper].values())


def test_one_figure_is_measured_for_and_written_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, ...]] = []
    measure = SimpleNamespace(run_draftexpert=lambda _, numbers, __: asked.append(numbers))
    monkeypatch.setitem(sys.modules, "moexp.bench.draftexpert", measure)  # whose import takes long
    monkeypatch.chdir(tmp_path)
    shown = moexp_("bench", "--figure", "1", "--out", str(folder))
    assert shown.exit_code == 0, shown.output
    where = Path("results/tiny/draftexpert")
    files = [where / f"figure_1.{kind}" for kind in ("png", "svg", "csv")]
    assert shown.stdout.split() == [str(file) for file in files]
    assert sorted(where.iterdir()) == sorted(files) and asked == [(2,)]


def test_a_figure_of_the_trace_needs_nothing_measured(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for paper in FIGURES:
        monkeypatch.setitem(sys.modules, f"moexp.bench.{paper}", None)  # an import of it fails
    recipe = load_recipe("tiny")
    for paper, name in (("draftexpert", "5"), ("ecospec", "4")):
        with pytest.raises(MoexpError, match=f"figure {name} has nothing.*moexp trace-routing --recipe tiny"):
            run_bench(recipe, figure=name, paper=paper, results=tmp_path / "results")
    trace_folder(recipe).parent.mkdir(parents=True)
    trace.rename(trace_folder(recipe))
    for paper, name in (("draftexpert", "5"), ("ecospec", "4")):
        files = run_bench(recipe, figure=name, paper=paper, results=tmp_path / "results")
        assert [file.name for file in files] == [f"figure_{name}.{kind}" for kind in ("png", "svg", "csv")]


def test_what_cannot_be_asked_for_is_one_clear_error():
    for words, wanted in (
        (["--figure", "9"], "no figure '9' to draw (--figure); valid: 1, 2, 3, 4, 5, speedup, acceptance"),
        (["--figure", "2", "--paper", "ecospec"], "no figure '2' to draw (--figure); valid: 1, 4, gamma"),
        (["--figure", "1", "--table", "2"], "--table and --figure exclude each other; valid: one of the two"),
    ):
        shown = moexp_("bench", *words)
        assert (shown.exit_code, shown.stderr) == (2, f"moexp: error: {wanted}\n")
    assert parse_request(None, None, "draftexpert") == (TABLES["draftexpert"], None)
    assert parse_request("4", None, "draftexpert") == ((4,), None)
    assert parse_request(None, "4", "draftexpert") == (None, "4")
