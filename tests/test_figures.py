"""Figures from hand-made records and traces: what is drawn is what the CSV beside it holds."""

from __future__ import annotations

import csv
import json
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from moexp.base.errors import MoexpError
from moexp.config.locations import trace_folder
from moexp.config.recipe import load_recipe
from moexp.papers import load_paper
from moexp.tables.core.plot import Plot, render, write_plot
from moexp.tables.draftexpert.index import build_plots as draftexpert_plots
from moexp.tables.draftexpert.labels import AR, FIXED, FULL
from moexp.tables.ecospec.index import build_plots as ecospec_plots
from moexp.tables.write import draw_figures, rebuild
from tests.test_report import PROVENANCE, TOKENS, cycles, save

pytestmark = pytest.mark.e2e

TARGET = {
    "name": "tiny", "num_experts": 8, "top_k": 2, "num_shared": 1, "layers": 3, "moe_layers": 2, "max_positions": 64,
    "expert_bytes": 3_000_000, "resident_bytes": 1_000_000, "gamma": 4,
}  # fmt: skip
BY_POSITION = {"top-1": [0.5, 0.25], "draft-expert": [0.75, 0.5]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two layers of four experts; texts of two tokens, so that longer blocks have no value."""
    folder = tmp_path / "trace"
    folder.mkdir()
    head = "block_length,unique_verify_per_layer,lowest_layer,highest_layer,uniform,blocks,tag\n"
    rows = (
        "1,2.0000,2.0000,2.0000,2.0000,8,measured\n2,3.0000,2.5000,3.5000,3.5000,4,measured\n3,,,,4.6250,0,measured\n"
    )
    (folder / "union_growth.csv").write_text(head + rows)
    loads = {1: (4, 4, 4, 4), 2: (0, 2, 6, 8)}
    lines = [
        f"{layer},{expert},{tokens},{tokens / 4:.4f},measured\n"
        for layer, counts in loads.items()
        for expert, tokens in enumerate(counts)
    ]
    (folder / "expert_load.csv").write_text("layer,expert,tokens,load_over_mean,tag\n" + "".join(lines))
    (folder / "manifest.json").write_text(json.dumps({"provenance": PROVENANCE}))
    return folder


@pytest.fixture
def draftexpert(tmp_path: Path) -> Path:
    """AR takes 0.1 s a token; the full method emits 4 tokens in 0.2 s, on two platforms."""
    folder = tmp_path / "draftexpert"
    for platform, tag in (("local-disk", "measured"), ("paced-cg", "emulated")):
        for request, tokens in enumerate(TOKENS):
            save(folder / platform, cycles(AR, request, tokens, 1, 0.1), tag=tag)
            save(folder / platform, cycles("top-1", request, tokens, 2, 0.4), tag=tag)
            save(folder / platform, cycles(FIXED, request, tokens, 4, 0.4), tag=tag)
            save(folder / platform, cycles(FULL, request, tokens, 4, 0.2), tag=tag)
    (folder / "target.json").write_text(
        json.dumps({"name": "tiny", "top_k": 3, "platforms": ["local-disk", "paced-cg"]})
    )
    metrics = {name: {"by_position": shares, "blocks": 128} for name, shares in BY_POSITION.items()}
    (folder / "draft_metrics.json").write_text(json.dumps({"metrics": metrics}))
    (folder / "provenance.json").write_text(json.dumps({"invocations": [PROVENANCE]}))
    (folder / "recipe.yaml").write_text("")
    return folder


def _eco(folder: Path, gammas: tuple[int, ...] = (2, 4)) -> Path:
    """Verification takes 10 ms and 5 ms an expert, with the experts in memory."""
    folder.mkdir()
    for gamma in gammas:
        place = folder / "resident" / ("t0" if gamma == TARGET["gamma"] else f"gamma-{gamma}")
        for request, tokens in enumerate(TOKENS):
            for name, experts in ((AR, 4), ("EAGLE-3", 4 + gamma), ("EAGLE-3 + EcoSpec", 3 + gamma)):
                steps = cycles(name, request, tokens, 1 if name == AR else 2, 0.4, unique_verify=experts)
                save(place, [replace(step, verify_s=0.01 + 0.005 * experts) for step in steps])
    if TARGET["gamma"] in gammas:
        save(folder / "resident" / "t0", cycles("EAGLE-3 + oracle", 0, TOKENS[0], 2, 9.0, unique_verify=1))
    (folder / "ecospec_target.json").write_text(json.dumps(TARGET))
    (folder / "recipe.yaml").write_text("")
    return folder


@pytest.fixture
def ecospec(tmp_path: Path) -> Path:
    return _eco(tmp_path / "ecospec")


def read(path: Path) -> list[dict[str, str]]:
    with open(path) as lines:
        return list(csv.DictReader(lines))


def drawn(plots: list[Plot]) -> list[str]:
    return [plot.name for plot in plots]


def test_draftexperts_figures_hold_what_tables_and_trace_say(draftexpert: Path, trace: Path, tmp_path: Path):
    recipe = load_recipe("tiny", ["bench.bootstrap_samples=20"])
    files = draw_figures(recipe, "draftexpert", draftexpert, trace, tmp_path / "results")
    folder = tmp_path / "results" / "tiny" / "draftexpert"
    names = ("2", "4", "5", "speedup", "acceptance")
    assert files == [folder / f"figure_{name}.{kind}" for name in names for kind in ("png", "svg", "csv")]
    speed = {(row["platform"], row["method"]): row for row in read(folder / "figure_speedup.csv")}
    assert {method for _, method in speed} == {"top-1", FIXED, "draft-expert"}
    full = speed["paced-cg", "draft-expert"]
    assert (full["speedup"], full["speedup_lo"], full["byte_bound"], full["tag"]) == ("2", "2", "2", "emulated")
    accepted = read(folder / "figure_acceptance.csv")
    assert [(row["drafter"], row["position"], float(row["acceptance"])) for row in accepted] == [
        (drafter, str(place), share)
        for drafter, shares in BY_POSITION.items()
        for place, share in enumerate(shares, 1)
    ]  # fmt: skip
    growth = read(folder / "figure_5.csv")
    assert [(row["block_length"], row["highest_layer"], row["uniform"]) for row in growth] == [
        ("1", "2", "2"),
        ("2", "3.5", "3.5"),
    ]
    tags = {row["tag"] for file in files if file.suffix == ".csv" for row in read(file)}
    assert tags == {"measured", "emulated", "paper"}


def test_ecospecs_figures_hold_steps_their_fit_and_the_papers_sizes(ecospec: Path, trace: Path, tmp_path: Path):
    recipe = load_recipe("tiny", ["bench.bootstrap_samples=20"])
    files = draw_figures(recipe, "ecospec", ecospec, trace, tmp_path)
    assert [file.name for file in files if file.suffix == ".png"] == [
        "figure_1.png",
        "figure_4.png",
        "figure_gamma.png",
    ]
    folder = tmp_path / "tiny" / "ecospec"
    first = read(folder / "figure_1.csv")
    steps = [row for row in first if row["series"] == "step"]
    assert len(steps) == 2 * 2 * (8 + 4 + 4) and "EAGLE-3 + oracle" not in {row["method"] for row in steps}
    assert {(row["unique_experts"], row["verify_ms"]) for row in steps if row["method"] == AR} == {("4", "30")}
    line = [(row["unique_experts"], float(row["verify_ms"])) for row in first if row["series"] == "linear fit"]
    assert line == [("4", pytest.approx(30)), ("8", pytest.approx(50))]
    sizes = {(row["target"], row["tag"]): float(row["expert_mb"]) for row in first if row["panel"] == "c"}
    theirs = load_paper("ecospec").figures[1]["expert_mb"]
    assert sizes == {("tiny", "measured"): 3.0, **{(name, "paper"): size for name, size in theirs.items()}}
    assert [row["unique_verify_per_layer"] for row in first if row["panel"] == "b"] == ["2", "3"]

    fourth = read(folder / "figure_4.csv")
    assert [row["load_over_mean"] for row in fourth if row["panel"] == "a" and row["layer"] == "2"] == [
        "0", "0.5", "1.5", "2",
    ]  # fmt: skip
    spread = next(row for row in fourth if row["panel"] == "b" and row["layer"] == "2")
    assert (spread["lowest"], spread["median"], spread["highest"]) == ("0", "1", "2")

    sweep = {(row["method"], row["budget"]): row for row in read(folder / "figure_gamma.csv")}
    assert {method for method, _ in sweep} == {"EAGLE-3", "EAGLE-3 + EcoSpec"}
    assert (sweep["EAGLE-3", "4"]["experts_per_layer"], sweep["EAGLE-3", "4"]["alpha"]) == ("4", "2")
    assert all(row["tag"] for rows in (first, fourth, sweep.values()) for row in rows)


def test_what_has_no_data_is_left_out(draftexpert: Path, trace: Path, tmp_path: Path):
    nothing = tmp_path / "nothing"
    assert draftexpert_plots(nothing, None) == [] and ecospec_plots(nothing, nothing) == []
    assert drawn(draftexpert_plots(nothing, trace)) == ["5"]
    assert drawn(draftexpert_plots(draftexpert, None, samples=5)) == ["2", "4", "speedup", "acceptance"]
    (draftexpert / "draft_metrics.json").write_text(json.dumps({"metrics": {"top-1": {"acceptance": 0.4}}}))
    assert drawn(draftexpert_plots(draftexpert, None, samples=5)) == ["2", "4", "speedup"]

    one = ecospec_plots(_eco(tmp_path / "one", gammas=(4,)), None, samples=5)
    assert drawn(one) == ["1"] and {row["panel"] for row in one[0].rows} == {"a", "c"}
    only_trace = ecospec_plots(nothing, trace)
    assert drawn(only_trace) == ["1", "4"] and {row["panel"] for row in only_trace[0].rows} == {"b"}
    for plot in [*one, *only_trace]:
        assert render(plot)


def test_steps_that_all_touch_as_many_experts_have_no_fit(tmp_path: Path):
    save(tmp_path / "resident" / "t0", cycles(AR, 0, TOKENS[0], 1, 0.1))
    (plot,) = ecospec_plots(tmp_path, None, samples=5)
    assert {row["series"] for row in plot.rows} == {"step"} and render(plot)


def test_each_platform_has_its_own_steps_and_line(ecospec: Path, trace: Path):
    for request, tokens in enumerate(TOKENS):
        save(ecospec / "local-disk" / "t0", cycles("MTP", request, tokens, 2, 0.4, unique_verify=5 + request))
    first, *_, gamma = ecospec_plots(ecospec, trace, samples=5)
    count = Counter((row.get("platform"), row["series"]) for row in first.rows if row["panel"] == "a")
    assert (
        count["local-disk", "step"] == 8 and count["local-disk", "linear fit"] == count["resident", "linear fit"] == 2
    )
    assert {row["platform"] for row in gamma.rows} == {"resident"} and "resident" in gamma.title
    image = render(first)  # four panels, in two rows
    assert struct.unpack(">I", image[20:24]) > (1200,)


def test_report_draws_from_the_recipes_own_trace_and_the_same_bytes_each_time(
    ecospec: Path, trace: Path, tmp_path: Path
):
    recipe = load_recipe("tiny", ["bench.bootstrap_samples=20"])
    own = trace_folder(recipe)
    own.parent.mkdir(parents=True)
    trace.rename(own)
    once, again = (
        [file for file in rebuild(recipe, "ecospec", out=ecospec, results=tmp_path / name) if "figure" in file.name]
        for name in ("a", "b")
    )
    assert [file.name for file in once[::3]] == ["figure_1.png", "figure_4.png", "figure_gamma.png"]
    assert [file.read_bytes() for file in once] == [file.read_bytes() for file in again]


def test_an_image_has_its_provenance_in_it_and_no_date_or_version_beside(ecospec: Path, trace: Path):
    first, fourth, gamma = ecospec_plots(ecospec, trace, samples=5)
    assert len(first.sources) == 2 and len(fourth.sources) == len(gamma.sources) == 1
    for line in [*first.sources, *fourth.sources, *gamma.sources]:
        assert "commit 0123456789ab (dirty)" in line and "A CPU, 2 cores" in line
    image = render(gamma)
    assert image.startswith(b"\x89PNG") and b"tEXt" not in image and b"tIME" not in image
    assert struct.unpack(">I", image[16:20]) == (1600,)
    assert image != render(replace(gamma, sources=["elsewhere"]))


def test_a_value_without_a_tag_is_refused(ecospec: Path, tmp_path: Path):
    gamma = ecospec_plots(ecospec, None, samples=5)[-1]
    with pytest.raises(AssertionError, match="gamma"):
        write_plot(tmp_path / "out", replace(gamma, rows=[*gamma.rows, {"method": "x", "tag": None}]))
    assert not (tmp_path / "out").exists()


def test_a_broken_table_of_a_trace_is_named(trace: Path, tmp_path: Path):
    (trace / "union_growth.csv").write_text("block_length,unique_verify_per_layer\n1,many\n")
    with pytest.raises(MoexpError, match=r"union_growth\.csv"):
        draftexpert_plots(tmp_path, trace)


def test_figures_import_no_torch_and_matplotlib_only_to_draw():
    script = (
        "import sys, moexp.tables.write, moexp.cli.stages; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent).returncode == 0
