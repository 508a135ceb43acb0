"""The audit against values worked out by hand from the papers, and against results that are broken on purpose."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moexp import metrics
from moexp.audit import Audit, our_lines, paper_lines, run_audit
from moexp.audit.files import read_sheet
from moexp.audit.lines import Input, Line, derive, farthest, number, same
from moexp.audit.notation import value_of
from moexp.base.errors import MoexpError
from moexp.cli import main as cli

REPO = Path(__file__).parent.parent
RESULTS = REPO / "results"


@pytest.fixture(scope="module")
def lines() -> dict[str, Line]:
    found = paper_lines()
    assert len({line.id for line in found}) == len(found)
    return {line.id: line for line in found}


def results(tmp_path: Path, file: str = "", old: str = "", new: str = "") -> Path:
    """A copy of our results, with one replacement in one file's header."""
    folder = tmp_path / "results"
    shutil.copytree(
        RESULTS / "pocket", folder / "pocket", ignore=shutil.ignore_patterns("*.png", "figure_4.csv", "audit.*")
    )
    if file:
        path = folder / "pocket" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
    return folder


def spoiled(tmp_path: Path, file: str, column: str, change: Callable[[str], str], **row: str) -> Path:
    """A copy of our results; in the first line of a file that has these cells, one more is changed."""
    folder = results(tmp_path)
    path = folder / "pocket" / file
    header, *lines = list(csv.reader(io.StringIO(path.read_text())))
    at = header.index(column)
    line = next(
        line for line in lines if line[at] and all(line[header.index(name)] == value for name, value in row.items())
    )
    line[at] = change(line[at])
    path.write_text("".join(",".join(cells) + "\n" for cells in [header, *lines]))
    return folder


def more(value: str) -> str:
    return f"{float(value) + 0.01:.6g}"


TOP_1 = {"platform": "local-disk", "method": "top-1", "workload": "mean", "tag": "measured"}


# --- what the papers imply ---

GOLDEN = {
    # (p + p^2 + p^3 + p^4) / 4 of Table 5's agreement, beside Table 3's acceptance
    "de.accept.ds.top-1": ((0.477 + 0.2275 + 0.1085 + 0.0518) / 4, 0.225),
    "de.accept.ds.draft-expert": ((0.87 + 0.7569 + 0.6585 + 0.5729) / 4, 0.85),
    "de.accept.ml.top-1": ((0.45 + 0.2025 + 0.0911 + 0.0410) / 4, 0.218),
    # (1 + 4 x 0.85) / (4 x 1.05 / 4.7 + 2.35)
    "de.cycle.fixed.ds.cg": (4.4 / (0.8936 + 2.35), 1.36),
    "de.cycle.fixed.ml.mn": (4.32 / (4 * 1.09 / 4.7 + 3.3), 1.61),
    "de.block.ds.cg": ((1.36 * 1.25 - 1) / (0.85 - 1.36 * 1.05 / 4.7), None),
    # 2.19 x (1 + 4 x 0.459) / (4 x 1.59 / 4.7 + 2.35): r = 3 is the fastest
    "de.top-r.ds.cg": (2.19 * 2.836 / (1.3532 + 2.35), 1.19),
    # L/c = 3.7 / (1 - 4.7 / 6) = 17.08: 18.08 / (1 + 17.08 / 3) and 18.08 / (1 + 17.08 / 2)
    "de.draft.speed.top-2": (2.70, 2.7),
    "de.draft.speed.top-3": (1.895, 2.0),
    "de.draft.cost.top-2.cg": (4.7 / 2.7, 1.36),
    # (1 + 0.4106 / 3) / (1 + 0.4106 / 6), with 14.36 / 10.18 - 1 = 0.4106
    "de.draft.cost.top-2.mn": (1.1369 / 1.0684, 1.47),
    "de.unique.ds.top-1": (26 * 64 * (1 - (63 / 64) ** 4), 84),
    "de.verify.mn": (6 * (3.1 * 1.4106 - 1) / 0.4106, 24.88),
    # 26 layers x 6 experts x 8,650,752 weights x 2 bytes = 2.699 GB a token; with 18 bytes for 32 weights 0.7591 GB
    "de.link.ds.cg": (2.699 * 2.19, 31.5),
    "de.link.ds.mn": (0.7591 * 10.18, 5.8),
    "de.link.added": (0.7591 / (1 / 10.18 - 1 / 14.36), 5.8),
    "de.weights.params": (26 * 64 * 8.650752e-3, 14.4),
    "de.weights.gib": (28.8e9 / 2**30, 26.8),
    "de.speedup.mean": ((1.36 + 1.52 + 1.29 + 1.61) / 4, 1.45),
    "de.abstract.3": (0.85, 0.87),
    # alpha T_AR / T_step
    "eco.cycle.qwen3.base": (2.41 * 0.49 / 0.84, 1.22),
    "eco.cycle.qwen3.eco": (2.32 * 0.49 / 0.742, 1.36),
    "eco.cycle.gptoss.base": (1.88 * 0.081 / 0.148, 1.14),
    "eco.cycle.gptoss.eco": (1.86 * 0.081 / 0.129, 1.31),
    # 256 (1 - (31/32)^4) and 128 (1 - (31/32)^4)
    "eco.uniform.dsv3.base.t0": (30.53, 31.4),
    "eco.uniform.gptoss.eco.t0": (15.27, 10.6),
    "eco.limit.table-9": (16, 17.8),
    # Table 2: resident GB = 99.3 - 94 x 23.7 x 0.03775, and the same for the others
    "eco.hbm.resident.qwen3": (15.2, 15.62),
    "eco.hbm.resident.gptoss": (0.80, 0.758),
    "eco.hbm.resident.dsv3": (17.09, 16.57),
    "eco.hbm.read.qwen3": (15.2 + 94 * 20.5 * 0.03775, 88.1),
    "eco.hbm.read.gptoss": (0.80 + 36 * 10.6 * 0.01245, 5.5),
    "eco.hbm.read.dsv3": (17.09 + 58 * 31.2 * 0.04404, 96.8),
    "eco.hbm.percent.dsv3": (0.5 / 97.3 * 100, 1.0),
    "eco.hbm.rate.qwen3": (99.3 / 0.832, 4800),
    "eco.expert.dsv3": (3 * 7168 * 2048 / 1e6, 44.04),
    "eco.bytes.gain.dsv3": ((2.79 / 2.85) / (96.8 / 97.3), 1.15 / 1.1),
    "eco.linear.qwen3": (0.49 + 0.342 * 12.5 / 15.7, 0.73),
    "eco.least.gptoss": ((0.004 + 0.035 + 0.081) / 0.081, 1.9 / 1.45),
    # GPT-OSS, EAGLE-3, gamma = 3: (1.45 + 1.62 + 1.80 + 1.92 + 1.92 + 1.92 + 1.82) / 7
    "eco.mean.12.alpha": (12.45 / 7, 1.72),
    "eco.gamma.12.workloads": (3, 4),
}


@pytest.mark.parametrize("id", GOLDEN)
def test_a_line_is_what_one_works_out_by_hand(lines: dict[str, Line], id: str):
    implied, reported = GOLDEN[id]
    line = lines[id]
    assert line.implied == pytest.approx(implied, rel=2e-3)
    if reported is None:
        assert line.reported is None
    else:
        assert line.reported is not None and line.reported.value == pytest.approx(reported, rel=2e-3)
    assert line.tag == "paper" and line.consistent is None


EQUAL = [
    "de.cycle.fixed.ds.cg", "de.weights.share", "de.speedup", "de.hit", "de.waste", "de.abstract.4", "eco.step",
    "eco.rho", "eco.scores", "eco.best", "eco.hbm.read.qwen3", "eco.hbm.read.gptoss", "eco.hbm.read.dsv3",
    "eco.mean.1.speedup", "eco.same.1-3", "eco.same.1-11", "eco.same.1-12", "eco.same.3-10",
]  # fmt: skip
APART = [
    "de.accept.ds.draft-expert", "de.cycle.fixed.ds.mn", "de.link.ds.mn", "de.abstract.3", "eco.cycle.qwen3.eco",
    "eco.uniform.dsv3.base.t0", "eco.limit.table-9", "eco.hbm.percent.dsv3", "eco.mean.12.alpha",
]  # fmt: skip


@pytest.mark.parametrize("id", EQUAL + APART)
def test_rounding_is_told_from_a_difference(lines: dict[str, Line], id: str):
    assert (lines[id].gap == 0) == (id in EQUAL)


def test_counts_of_rows_that_agree(lines: dict[str, Line]):
    found = {
        id: (lines[id].agree, lines[id].rows) for id in ("eco.mean.12.alpha", "eco.limit.table-9", "de.abstract.3")
    }
    assert found == {"eco.mean.12.alpha": (5, 8), "eco.limit.table-9": (11, 12), "de.abstract.3": (0, 2)}
    assert lines["eco.limit.table-9"].subject == "GPT-OSS-120B, predictor 0.5, workload MTBench"


def test_findings_are_one_sentence_and_judge_nothing(lines: dict[str, Line]):
    for line in lines.values():
        assert line.finding.endswith(".") and ". " not in line.finding.replace("Avg. ", ""), line.finding
        assert not {"wrong", "error", "incorrect", "suspicious", "impossible"} & set(line.finding.lower().split())
    assert lines["eco.cycle.qwen3.base"].finding == (
        "Implied 1.41x (1.40 to 1.41 over the inputs' rounding), Table 1 has 1.22, 0.868 times that."
    )
    assert lines["de.cycle.truncated"].finding.startswith("Not calculated: neither its tokens/s")


@given(acceptance=st.floats(0.01, 0.99))
def test_agreement_and_acceptance_are_each_others_inverse(acceptance: float):
    agreement = value_of("p of (p + p^2 + p^3 + p^4) / 4 = a", [("a", acceptance)])
    assert metrics.expected_acceptance(agreement) == pytest.approx(acceptance)


# --- lines ---


@given(a=st.floats(0.1, 100), b=st.floats(0.1, 100), step=st.sampled_from([0.0, 0.001, 0.01, 0.1]))
def test_a_range_holds_its_value_and_grows_with_rounding(a: float, b: float, step: float):
    def quotient(step: float) -> Line:
        inputs = [Input("a", a, "", step), Input("b", b, "", step)]
        return derive("", "a / b", inputs, Input("c", a / b, ""))

    line, exact = quotient(step), quotient(0.0)
    assert line.low is not None and line.high is not None and line.implied is not None
    assert line.low <= line.implied <= line.high and exact.low == exact.high == line.implied
    assert line.gap == 0 and line.ratio == pytest.approx(1)


@given(value=st.floats(1, 100), apart=st.floats(0.001, 0.5), relation=st.sampled_from(["=", "<=", ">="]))
def test_a_figure_beyond_its_tolerance_is_inconsistent_on_the_side_that_its_relation_forbids(
    value: float, apart: float, relation: Any
):
    for sign, forbidden in ((1, ("=", "<=")), (-1, ("=", ">="))):
        reported = Input("b", value * (1 + sign * apart), "table")
        line = same("ours", Input("a", value, "table"), reported, relation=relation, tolerance=1e-4)
        assert line.consistent is (relation not in forbidden)


def test_the_farthest_row_stands_for_all():
    made = [same("p", Input("a", 1, "A", 0.01), Input("b", b, "B", 0.01), subject=f"row {b}") for b in (1, 1.2)]
    line = farthest("all", "what", made)
    assert (line.id, line.rows, line.agree, line.subject) == ("all", 2, 1, "row 1.2")
    assert line.finding.startswith("1 of 2 are equal within rounding; farthest is row 1.2: implied 1")


def test_numbers_have_three_digits_and_no_exponent():
    assert [number(v) for v in (0, 1.359, 30.53, 4800.4, 0.0001234, 16)] == [
        "0", "1.36", "30.5", "4800", "0.000123", "16",
    ]  # fmt: skip
    assert number(10.18, 0.01) == "10.18"


# --- our results ---


def test_our_results_are_consistent_and_tagged():
    found, left_out = our_lines(RESULTS / "pocket")
    assert [line.finding for line in found if line.consistent is False] == []
    assert left_out == []
    assert {"measured", "emulated"} <= {line.tag for line in found} <= {"measured", "emulated", "simulated"}
    assert len({line.id for line in found}) == len(found) and max(len(line.id) for line in found) <= 27
    assert sum(line.tolerance is not None for line in found) > 40


EAGLE = {"platform": "resident", "method": "EAGLE-3", "tag": "measured"}
BROKEN: dict[str, tuple[str, Callable[[str], str], dict[str, str], str]] = {
    "draftexpert/table_2.csv": ("speedup", more, TOP_1, "ours.de.speedup"),
    "draftexpert/table_3.csv": ("acceptance", more, {"platform": "local-disk"}, "ours.de.platforms"),
    "draftexpert/table_4.csv": ("prefetch_waste", more, {"platform": "local-disk"}, "ours.de.waste"),
    "ecospec/table_2.csv": ("model_gb", lambda value: f"{float(value) + 0.1:.6g}", EAGLE, "ours.eco.model"),
    "ecospec/table_3.csv": ("step_s", lambda value: f"{float(value) - 0.01:.6g}", EAGLE, "ours.eco.step"),
    "ecospec/table_11.csv": ("uniform", lambda value: f"{float(value) - 3:.6g}", EAGLE, "ours.eco.uniform.11"),
}


@pytest.mark.parametrize("file", BROKEN)
def test_a_broken_figure_is_found_and_its_line_named(tmp_path: Path, file: str):
    column, change, row, id = BROKEN[file]
    found, _ = our_lines(spoiled(tmp_path, file, column, change, **row) / "pocket")
    assert id in {line.id for line in found if line.consistent is False}


def test_what_is_missing_is_left_out_and_said(tmp_path: Path):
    folder = results(tmp_path)
    (folder / "pocket" / "draftexpert" / "table_4.csv").unlink()
    audit = run_audit("pocket", results=folder)
    assert [reason.split(":")[0] for reason in audit.left_out] == ["ours.de verification"]
    assert "no draftexpert/table_4.csv" in audit.left_out[0] and not audit.inconsistent
    assert "## Left out" in (folder / "pocket" / "audit.md").read_text()


def test_without_results_the_papers_alone_are_audited(tmp_path: Path):
    audit = run_audit("nothing", results=tmp_path, out=tmp_path / "out")
    assert {line.paper for line in audit.lines} == {"draftexpert", "ecospec"}
    assert len(audit.left_out) > 10 and all("no " in reason for reason in audit.left_out)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fast", "speedup is not a number: 'fast'"),
        ("nan", "speedup is not a number: 'nan'"),
        ("0.5,0", "cells under"),
    ],
)
def test_a_malformed_cell_is_one_clear_error(tmp_path: Path, value: str, message: str):
    folder = spoiled(tmp_path, "draftexpert/table_2.csv", "speedup", lambda _: value, **TOP_1)
    with pytest.raises(MoexpError, match=message) as caught:
        our_lines(folder / "pocket")
    assert "table_2.csv" in caught.value.where


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",byte_bound_share,", ",other,", "no column 'byte_bound_share'"),
        (",tag,", ",mark,", "no header of a results table"),
    ],
)
def test_a_malformed_header_is_one_clear_error(tmp_path: Path, old: str, new: str, message: str):
    folder = results(tmp_path, "draftexpert/table_2.csv", old, new)
    with pytest.raises(MoexpError, match=message) as caught:
        our_lines(folder / "pocket")
    assert "table_2.csv" in caught.value.where


def test_an_unreadable_table_is_an_error_too(tmp_path: Path):
    for name, content in (("bytes.csv", b"\xff\xfe"), ("empty.csv", b""), ("quote.csv", b'tag\n"a"b\n')):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MoexpError):
            read_sheet(tmp_path, name)


# --- the command ---


def moexp(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["audit", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_the_command_prints_80_columns_and_writes_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = moexp("--recipe", "pocket")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "eco.cycle.gptoss.eco" in result.output and "ours.de.speedup.emulated" in result.output
    rows = list(csv.DictReader(io.StringIO((tmp_path / "results/pocket/audit.csv").read_text())))
    tags = {row["tag"] for row in rows}
    assert {"paper", "measured", "emulated"} <= tags <= {"paper", "measured", "emulated", "simulated"}
    by_id = {row["id"]: row for row in rows}
    assert by_id["eco.cycle.gptoss.base"]["implied"] == "1.02892"
    assert (
        by_id["eco.cycle.gptoss.base"]["inputs"] == "alpha=1.88 (Table 3); T_AR=0.081 (Table 3); T_step=0.148 (Table 3)"
    )
    text = (tmp_path / "results/pocket/audit.md").read_text()
    assert "## EcoSpec, arXiv 2607.12696 (paper)" in text and "`ours.eco.cycle`" in text


def test_an_inconsistency_ends_with_1_and_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spoiled(tmp_path, "draftexpert/table_2.csv", "speedup", more, **TOP_1)
    monkeypatch.chdir(tmp_path)
    result = moexp("--recipe", "pocket", "--out", "elsewhere")
    assert result.exit_code == 1
    assert "inconsistent: ours.de.speedup: " in result.output and "local-disk, top-1, mean" in result.output
    assert (tmp_path / "elsewhere" / "audit.md").exists() and not (tmp_path / "results/pocket/audit.md").exists()


def test_a_malformed_table_ends_with_2_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spoiled(tmp_path, "draftexpert/table_2.csv", "speedup", lambda _: "fast", **TOP_1)
    monkeypatch.chdir(tmp_path)
    result = moexp("--recipe", "pocket")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(
        "moexp: error: speedup is not a number: 'fast' (results/pocket/draftexpert/table_2.csv"
    )


def test_an_audit_needs_no_torch():
    script = "import sys; from moexp import audit; audit.paper_lines(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPO, timeout=120)


def test_an_audit_without_results_of_ours_is_consistent():
    assert Audit(paper_lines()).inconsistent == []
