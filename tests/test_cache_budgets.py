"""`moexp cache-budgets`: every policy and budget measured on disk, and the replay's counts beside."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moexp.bench.budgets import ALL, FOLDER, POLICIES
from moexp.cli import main as cli
from moexp.config.locations import run_folder
from moexp.config.recipe import load_recipe
from moexp.tables.core.run import REQUESTS

pytestmark = pytest.mark.e2e


def run(*words: str) -> None:
    shown = CliRunner().invoke(cli.app, [*words, "--recipe", "tiny"])
    assert shown.exit_code == 0, shown.output


def checked_rows(table: Path) -> list[dict[str, str]]:
    """The rows of a complete table: what does not depend on when a transfer lands is measured as it is simulated."""
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * (1 + 4 * len(POLICIES)) and {row["tag"] for row in rows} == {"measured", "simulated"}
    for measured, simulated in zip(rows[::2], rows[1::2], strict=True):
        same = ["demanded"]
        if measured["method"] == "ar":  # without prefetches
            assert measured["counters"] == "equal", measured
            same += ["hits", "missed", "bytes_per_token"]
        assert [measured[name] for name in same] == [simulated[name] for name in same]
        assert float(measured["tokens_per_s"]) > 0 and float(simulated["tokens_per_s"]) > 0
    return rows


def test_all_budgets_are_measured_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for stage in ("build-target", "trace-routing", "train-draft-expert"):
        run(stage)
    run("cache-budgets", "--prompts", "1", "--tokens", "6")
    results = tmp_path / "results" / "tiny"
    rows = checked_rows(results / "cache_budgets.csv")

    def missed(policy: str, percent: str) -> int:
        (found,) = [
            row for row in rows[::2] if (row["policy"], row["budget_percent"], row["method"]) == (policy, percent, "ar")
        ]
        return int(found["missed"])

    for policy in POLICIES:  # with room for all, only what the prompt never used is brought in, and once
        assert missed(policy, "100") < missed(policy, "10") <= missed("none", "0")
    assert len({missed(policy, "100") for policy in POLICIES}) == 1
    for kind in ("png", "svg", "csv"):
        assert (results / f"figure_cache_budgets.{kind}").stat().st_size > 0

    folder = run_folder(load_recipe("tiny")) / FOLDER
    before = {budget.name: (folder / budget.name / REQUESTS).read_text() for budget in ALL}
    lines = before["lru-50"].splitlines(keepends=True)
    (folder / "lru-25" / REQUESTS).write_text("".join(before["lru-25"].splitlines(keepends=True)[:-1]))  # cut off
    run("cache-budgets", "--prompts", "1", "--tokens", "6")
    after = {budget.name: (folder / budget.name / REQUESTS).read_text() for budget in ALL}
    assert {name for name in after if after[name] != before[name]} <= {"lru-25"}
    assert len(after["lru-25"].splitlines()) == len(lines)
    again = checked_rows(results / "cache_budgets.csv")
    assert [(row["policy"], row["missed"]) for row in again if row["method"] == "ar"] == [
        (row["policy"], row["missed"]) for row in rows if row["method"] == "ar"
    ]
