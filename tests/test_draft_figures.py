"""DraftExpert's figures 1 to 4, every value of their CSVs worked out again from the records."""

from __future__ import annotations

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moexp.config.recipe import load_recipe
from moexp.records import StepRecord
from moexp.tables.core.plot import Plot
from moexp.tables.core.rows import Bootstrapped
from moexp.tables.core.table import Row
from moexp.tables.draftexpert.index import build_plots
from moexp.tables.draftexpert.labels import AR, FIXED, FULL, TRUNCATED
from moexp.tables.write import draw_figures
from tests.test_report import PROVENANCE, save

pytestmark = pytest.mark.e2e


PLATFORMS = {"local-disk": "measured", "paced-cg": "emulated"}
DRAFTERS = {"top-1": "top-1", "top-2": "top-2", "top-3": "top-3", "draft-expert": FIXED}
SAMPLES = 40


def step(rng: random.Random, method: str, request: int, cycle: int, drafted: int) -> StepRecord:
    accepted = rng.randint(0, drafted)
    seconds = [rng.uniform(0.1, 1.0) for _ in range(3)]
    phase = "ar" if method == AR else "verify"
    union = rng.randint(10, 40)
    store = {f"{phase}_demanded": union, f"{phase}_hit": rng.randint(0, 9), f"{phase}_stall_s": seconds[1] / 3}
    return StepRecord(
        request=request, cycle=cycle, method=method, drafted=drafted, accepted=accepted, emitted=accepted + 1,
        tokens=list(range(accepted + 1)), draft_s=0.0 if method == AR else seconds[0], verify_s=seconds[1],
        cycle_s=sum(seconds), unique_draft=None if method == AR else 3 * drafted + rng.randint(0, 5),
        unique_verify=union, union_layers=2, store=store,
    )  # fmt: skip


@pytest.fixture
def steps() -> dict[str, list[StepRecord]]:
    """Cycles of three prompts on two platforms and in memory, where AR was not run."""
    rng = random.Random(5)
    made: dict[str, list[StepRecord]] = {}
    for place in (*PLATFORMS, "resident"):
        methods = [*DRAFTERS.values()] + ([] if place == "resident" else [AR, TRUNCATED, FULL])
        made[place] = [
            step(rng, method, request, cycle, 0 if method == AR else drafted)
            for method in methods
            for request in range(3)
            for cycle, drafted in enumerate([4, 4, 4, 4, *([request] if request < 2 else [3, 2])])
        ]
    return made


@pytest.fixture
def folder(steps: dict[str, list[StepRecord]], tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for place, mine in steps.items():
        for method in dict.fromkeys(one.method for one in mine):
            for request in range(3):
                of = [one for one in mine if (one.method, one.request) == (method, request)]
                save(run / place, of, tag=PLATFORMS.get(place, "measured"))
    sizes = [(32, 6 * 2**30, 2 * 2**30), (64, 12 * 2**30, 3 * 2**30)]
    target = {
        "name": "tiny", "top_k": 2, "num_experts": 8, "moe_layers": 2, "platforms": list(PLATFORMS),
        "weights": [{"expert_width": w, "routed_bytes": a, "rest_bytes": b} for w, a, b in sizes],
    }  # fmt: skip
    (run / "target.json").write_text(json.dumps(target))
    metrics = {"top-1": {"acceptance": 0.4, "per_row": [0.2, 0.6]}, "draft-expert": {"acceptance": 0.7}}
    (run / "draft_metrics.json").write_text(json.dumps({"metrics": metrics}))
    (run / "provenance.json").write_text(json.dumps({"invocations": [PROVENANCE]}))
    return run


def drawn(folder: Path, name: str) -> Plot:
    (plot,) = build_plots(folder, None, SAMPLES, name)
    return plot


def of(rows: list[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def resampled(prompts: int, value: Callable[[list[int]], float | None]) -> tuple[float, float]:
    """95% interval of `value` over prompts, each of which a sample holds some number of times."""
    times = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=SAMPLES)
    values = [found for sample in times if (found := value([n for n in range(prompts) for _ in range(sample[n])]))]
    return float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))


def test_figure_1_holds_weights_by_part_and_the_share_of_waiting(folder: Path, steps: dict[str, list[StepRecord]]):
    rows = drawn(folder, "1").rows
    assert [
        (r["target"], r.get("expert_width"), r["routed_gib"], r["rest_gib"], r["tag"]) for r in of(rows, panel="a")
    ] == [
        ("tiny", 32, 6, 2, "measured"), ("tiny", 64, 12, 3, "measured"),
        ("DeepSeek-V2-Lite", None, 26.8, 2.4, "paper"),
    ]  # fmt: skip
    assert [row["routed_share"] for row in of(rows, panel="a")] == [0.75, 0.8, 0.916]
    assert [row.get("padded") for row in of(rows, panel="a")] == [False, True, None]
    for platform, tag in PLATFORMS.items():
        ar = [one for one in steps[platform] if one.method == AR]
        (row,) = of(rows, panel="b", platform=platform)
        waited, took = sum(one.store["ar_stall_s"] for one in ar), sum(one.cycle_s for one in ar)
        assert row["wait_share"] == pytest.approx(waited / took) and row["tag"] == tag and row["prompts"] == 3
        assert row["wait_ms"] == pytest.approx(1000 * waited / len(ar))
        assert row["token_ms"] == pytest.approx(1000 * took / len(ar))
        by_prompt = [[one for one in ar if one.request == n] for n in range(3)]

        def share(chosen: list[int], by_prompt: list[list[StepRecord]] = by_prompt) -> float:
            mine = [one for n in chosen for one in by_prompt[n]]
            return sum(one.store["ar_stall_s"] for one in mine) / sum(one.cycle_s for one in mine)

        assert (row["wait_share_lo"], row["wait_share_hi"]) == pytest.approx(resampled(3, share))


def test_figure_2_holds_acceptance_and_the_speed_of_drafting(folder: Path, steps: dict[str, list[StepRecord]]):
    rows = drawn(folder, "2").rows
    for drafter, method in DRAFTERS.items():
        whole = [one for one in steps["resident"] if one.method == method and one.drafted == 4]
        (row,) = of(rows, panel="a", series="decoding, K = 4", drafter=drafter)
        assert row["acceptance"] == pytest.approx(
            sum(one.accepted for one in whole) / sum(one.drafted for one in whole)
        )
        for platform, tag in PLATFORMS.items():
            whole = [one for one in steps[platform] if one.method == method and one.drafted == 4]
            ar = [one for one in steps[platform] if one.method == AR]
            token_s = sum(one.cycle_s for one in ar) / len(ar)
            draft_s = sum(one.draft_s for one in whole) / sum(one.drafted for one in whole)
            (row,) = of(rows, panel="b", series=platform, drafter=drafter)
            assert row["draft_speedup"] == pytest.approx(token_s / draft_s)
            assert row["tag"] == tag and row["draft_speedup_lo"] < row["draft_speedup"] < row["draft_speedup_hi"]  # type: ignore[operator]
    held_out = of(rows, series="held-out text, K = 4")
    assert [(row["drafter"], row["acceptance"]) for row in held_out] == [("top-1", 0.4), ("draft-expert", 0.7)]
    theirs = of(rows, tag="paper")
    assert [row["acceptance"] for row in theirs if row["panel"] == "a"] == [0.22, 0.31, 0.42]
    assert [row["draft_speedup"] for row in theirs if row["panel"] == "b"] == [4.7, 2.7, 2.0]


def test_figure_3_holds_unions_by_tokens_drafted(folder: Path, steps: dict[str, list[StepRecord]]):
    rows = drawn(folder, "3").rows
    ours = [row for row in rows if row["tag"] != "paper"]
    assert {row["platform"] for row in ours} == {"resident"} and [row["steps"] for row in ours] == [1, 2, 3, 4] * 4
    for row in ours:
        method = DRAFTERS[str(row["drafter"])]
        mine = [one for one in steps["resident"] if (one.method, one.drafted) == (method, row["steps"])]
        unions = [one.unique_draft or 0 for one in mine]
        assert row["unique_draft"] == pytest.approx(statistics.mean(unions))
        assert (row["cycles"], row["prompts"]) == (len(unions), len({one.request for one in mine}))
        assert (row["unique_draft_lo"] is None) == (row["prompts"] == 1)
    theirs = [(row["drafter"], row["steps"], row["unique_draft"]) for row in of(rows, tag="paper")]
    assert theirs == [("top-1", 4, 84), ("top-2", 4, 183), ("top-3", 4, 244), ("draft-expert", 4, 88)]


def test_figure_4_holds_medians_by_block_length(folder: Path, steps: dict[str, list[StepRecord]]):
    rows = drawn(folder, "4").rows
    for place in (*PLATFORMS, "resident"):
        blocks: dict[int, list[StepRecord]] = defaultdict(list)
        for one in steps[place]:
            if one.method in ("top-1", FIXED, TRUNCATED):
                blocks[one.drafted + 1].append(one)
        if place == "resident":
            base = [(one.request, one.verify_s) for one in blocks[1]]
        else:
            blocks[1] = [one for one in steps[place] if one.method == AR]
            base = [(one.request, one.cycle_s) for one in blocks[1]]
        mine = of(rows, platform=place)
        assert [row["block_length"] for row in mine] == [1, 2, 3, 4, 5]
        for row in mine:
            block = blocks[int(str(row["block_length"]))]
            prompts = sorted({one.request for one in block} | ({n for n, _ in base} if place == "resident" else set()))

            def cost(
                chosen: list[int], block: list[StepRecord] = block, base: list[tuple[int, float]] = base,
                prompts: list[int] = prompts,
            ) -> float | None:  # fmt: skip
                above = [one.verify_s for n in chosen for one in block if one.request == prompts[n]]
                below = [seconds for n in chosen for request, seconds in base if request == prompts[n]]
                return statistics.median(above) / statistics.median(below) if above and below else None

            assert row["verify_cost"] == pytest.approx(cost(list(range(len(prompts)))))
            if len(prompts) > 1:
                ends = (row["verify_cost_lo"], row["verify_cost_hi"])
                assert ends == pytest.approx(resampled(len(prompts), cost))
            else:
                assert row["verify_cost_lo"] is None
            phase = "ar" if row["block_length"] == 1 and place != "resident" else "verify"
            loaded = [one.store[f"{phase}_demanded"] - one.store[f"{phase}_hit"] for one in block]
            assert row["loaded"] == statistics.median(loaded) and row["blocks"] == len(block)
            assert row["unique_verify"] == statistics.median(one.unique_verify or 0 for one in block)
        where = {(row["experts"], row["one_token"], row["tag"]) for row in mine}
        assert where == {
            ("in memory", "blocks of one", "measured") if place == "resident" else ("loaded", AR, PLATFORMS[place])
        }


def test_series_are_told_apart_without_colours_and_memory_stands_for_a_dense_ffn(folder: Path):
    from matplotlib.figure import Figure

    for name in ("2", "3", "4"):
        plot, figure = drawn(folder, name), Figure()
        plot.draw(figure, plot.rows)
        for axes in figure.axes:
            named = [line for line in axes.get_lines() if not str(line.get_label()).startswith(("_", "paper"))]
            assert (
                len({line.get_marker() for line in named})
                == len({line.get_linestyle() for line in named})
                == len(named)
            )
        if name == "4":
            (words,) = [str(line.get_label()) for line in named if "resident (measured)" in str(line.get_label())]
            assert "experts in memory: in place\nof the paper's dense FFN" in words


def test_medians_of_quotients_need_values_on_both_sides():
    run = Bootstrapped()
    run.samples = 10
    assert run.median_against([([], [1.0]), ([], [2.0])]).value is None
    assert run.median_against([([3.0, 9.0], [2.0])])[:3] == (3.0, None, None)
    one_sided = run.median_against([([4.0], []), ([], [2.0])])  # only samples that hold both count
    assert one_sided[:3] == (2.0, 2.0, 2.0)


def test_each_new_figure_is_left_out_without_its_data(folder: Path, steps: dict[str, list[StepRecord]], tmp_path: Path):
    def names(change: Callable[[StepRecord], StepRecord | None], weights: bool = False) -> list[str]:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, mine in steps.items():
            kept = [new for one in mine if (new := change(one)) is not None]
            for key in dict.fromkeys((one.method, one.request) for one in kept):
                save(place / name, [one for one in kept if (one.method, one.request) == key])
        target = json.loads((folder / "target.json").read_text())
        place.mkdir(exist_ok=True)
        (place / "target.json").write_text(json.dumps(target if weights else {**target, "weights": []}))
        return [plot.name for plot in build_plots(place, None, 5) if plot.name.isdecimal()]

    assert names(lambda one: one) == ["1", "2", "3", "4"]
    assert names(lambda one: replace(one, store={}), weights=True) == ["1", "2", "3", "4"]
    assert names(lambda one: replace(one, store={})) == ["2", "3", "4"]
    assert names(lambda one: replace(one, unique_draft=None)) == ["1", "2", "4"]
    assert names(lambda one: one if one.method == AR else None) == ["1"]
    assert names(lambda one: one if one.drafted == 4 or one.method == AR else None) == ["1", "2", "4"]


def test_the_same_records_give_the_same_bytes(folder: Path, tmp_path: Path):
    recipe = load_recipe("tiny", ["bench.bootstrap_samples=20"])
    files = [draw_figures(recipe, "draftexpert", folder, None, tmp_path / name, "4") for name in "ab"]
    assert [file.name for file in files[0]] == ["figure_4.png", "figure_4.svg", "figure_4.csv"]
    once, again = ([file.read_bytes() for file in mine] for mine in files)
    assert once == again
    image = once[1].decode()
    assert "<dc:date>" not in image and "<dc:creator>" not in image and "Matplotlib v" not in image
