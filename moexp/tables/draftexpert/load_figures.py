"""DraftExpert's figures 1 and 4: what loading experts costs plain decoding, and verification. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moexp import metrics
from moexp.metrics import Ratio
from moexp.papers import load_paper
from moexp.records import StepRecord
from moexp.tables.core.plot import BLACK, LIGHT, OTHER_LOOK, PLATFORM_LOOKS, SKY, Plot, draw_series, number, run_source
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.run import ArmRecords, Measured
from moexp.tables.core.table import Row, set_interval
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import AR, FIXED, RESIDENT, TOP_R, TRUNCATED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30

UNPREFETCHED = (TOP_R[1], FIXED, TRUNCATED)
"""Methods that draft with one expert a layer, and whose verification then loads itself what it still lacks."""

BLOCKS_OF_ONE = "blocks of one"


# --- figure 1 ---


def offloading(run: Run, folder: Path, _: Path | None) -> Plot | None:
    """Figure 1: (a) GiB of weights by part, (b) share of AR's decoding time that waits for experts, by platform."""
    weights, waits = _weight_rows(run), _wait_rows(run)
    if not weights and not waits:
        return None
    columns = ["panel", "target", "expert_width", "padded", "routed_gib", "rest_gib", "routed_share", "active_share"]
    columns += ["platform", *with_ends("wait_share"), "wait_ms", "token_ms", "prompts", "tag"]
    measured = [platform for platform in run.platforms if platform.name in {row["platform"] for row in waits}]
    sources = provenance_lines(measured) if measured else [run_source(folder)]
    title = f"Offloaded experts: their share of the weights, and waiting for them ({run.target.get('name')})"
    height = 1.3 + 0.5 * max(len(weights), len(waits))
    return Plot("1", title, columns, [*weights, *waits], _draw_offloading, height, sources)


def _weight_rows(run: Run) -> list[Row]:
    """Our target, its padded copy, and the paper's target; none before our own sizes are known."""
    ours: list[Row] = [
        {
            "panel": "a", "target": run.target["name"], "expert_width": kept["expert_width"], "padded": place > 0,
            "routed_gib": kept["routed_bytes"] / GIB, "rest_gib": kept["rest_bytes"] / GIB,
            "routed_share": kept["routed_bytes"] / (kept["routed_bytes"] + kept["rest_bytes"]),
            "active_share": run.target["top_k"] / run.target["num_experts"], "tag": MEASURED,
        }
        for place, kept in enumerate(run.target.get("weights", ()))
    ]  # fmt: skip
    kept = load_paper("draftexpert").figures[1]
    theirs: Row = {
        "panel": "a", "target": kept["weights_of"], "routed_gib": kept["routed_bf16_gib"],
        "rest_gib": kept["non_routed_gib"], "routed_share": kept["routed_share"], "tag": PAPER,
    }  # fmt: skip
    return [*ours, theirs] if ours else []


def _wait_rows(run: Run) -> list[Row]:
    """One row a platform whose store counted AR's stalls."""
    rows: list[Row] = []
    for platform in run.platforms:
        arms = platform.arms.get(AR, {})
        steps = [step for arm in arms.values() for step in arm.steps]
        wait, whole = metrics.time_profile(steps)["verify_wait"].value, metrics.token_time(steps).value
        if wait is None or whole is None or not all("ar_stall_s" in step.store for step in steps):
            continue
        row: Row = {
            "panel": "b", "target": run.target.get("name"), "platform": platform.name, "tag": platform.tag,
            "expert_width": platform.settings.get("expert_width"), "prompts": len(arms), "wait_ms": 1000 * wait,
            "token_ms": 1000 * whole,
        }  # fmt: skip
        set_interval(row, "wait_share", run.over(arms.values(), _wait_share))
        rows.append(row)
    return rows


def _wait_share(arm: ArmRecords) -> Ratio:
    """Seconds of stalls over seconds of decoding."""
    return Ratio(metrics.time_profile(arm.steps)["verify_wait"].num, metrics.token_time(arm.steps).num)


def _draw_offloading(figure: Figure, rows: list[Row]) -> None:
    draws = {"a": _draw_weights, "b": _draw_waits}
    panels = {name: mine for name in draws if (mine := [row for row in rows if row["panel"] == name])}
    for axes, (name, mine) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        draws[name](axes, mine)
        axes.set_xlim(0, 100)
        axes.set_ylim(len(mine) - 0.6, -0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=2, handlelength=1.6)


def _draw_weights(axes: Axes, rows: list[Row]) -> None:
    _draw_shares(axes, [number(row["routed_share"]) for row in rows], "routed experts", "all other weights")
    for place, row in enumerate(rows):
        width = "" if row.get("expert_width") is None else f", experts {row['expert_width']} wide"
        name = f"{row['target']}{width}{' (padded)' if row.get('padded') else ''}, {row['tag']}"
        sizes = f"{number(row['routed_gib']):.3g} + {number(row['rest_gib']):.3g} GiB"
        axes.text(0, place - 0.26, f"{name}: {sizes}", va="bottom", fontsize=7.5)
    axes.set_title("(a) weights")
    axes.set_xlabel("share of the bytes, %")


def _draw_waits(axes: Axes, rows: list[Row]) -> None:
    _draw_shares(axes, [number(row["wait_share"]) for row in rows], "waiting for experts", "all other time")
    for place, row in enumerate(rows):
        times = f"{number(row['wait_ms']):.0f} of {number(row['token_ms']):.0f} ms a token"
        axes.text(0, place - 0.26, f"{row['platform']}, {row['tag']}: {times}", va="bottom", fontsize=7.5)
        if row["wait_share_lo"] is not None:
            ends = [100 * number(row["wait_share_lo"]), 100 * number(row["wait_share_hi"])]
            axes.plot(ends, [place, place], color=BLACK, linewidth=1.6, marker="|", markersize=6)
    axes.set_title("(b) time of AR decoding")
    axes.set_xlabel("share of the time, % (black: 95% interval)")


def _draw_shares(axes: Axes, shares: Sequence[float], first: str, second: str) -> None:
    """Bars of two parts; the first is `shares`, from 0 to 1."""
    left, places = [100 * share for share in shares], range(len(shares))
    axes.barh(places, left, 0.4, color=SKY, label=first)
    axes.barh(places, [100 - share for share in left], 0.4, left=left, color=LIGHT, hatch="////", label=second)


# --- figure 4 ---


def verification(run: Run, _: Path, __: Path | None) -> Plot | None:
    """Figure 4: verification of a block over a one-token step, against the block's tokens, by where the experts are.

    The paper's line for a dense FFN has no counterpart among MoE targets. In its place stands the same target with all
    experts in memory: a model whose weights need no loading, but which still computes every expert of the union.
    """
    places = [*run.platforms, *([] if run.resident is None else [run.resident])]
    found = {place.name: _block_rows(run, place) for place in places}
    rows = [row for mine in found.values() for row in mine]
    if all(row["block_length"] == 1 for row in rows):
        return None
    columns = ["target", "platform", "experts", "expert_width", "block_length", *with_ends("verify_cost"), "one_token"]
    columns += ["unique_verify", "loaded", "blocks", "prompts", "tag"]
    title = f"What verifying a block costs ({run.target.get('name')})"
    sources = provenance_lines([place for place in places if found[place.name]])
    return Plot("4", title, columns, rows, _draw_verification, 3.7, sources)


def _block_rows(run: Run, platform: Measured) -> list[Row]:
    """One row a block length. Costs are medians over cycles; the one-token step is AR's on the same store.

    Where AR was not run, it is that of blocks of one token: verifying one is the same computation.
    """
    ar, drafted = _by_prompt(platform, [AR]), _by_prompt(platform, UNPREFETCHED)
    blocks = {length: _of_length(drafted, length) for length in _lengths(drafted)}
    one = ar or blocks.get(1, {})
    if not one:
        return []
    seconds = {n: [step.cycle_s if ar else step.verify_s for step in steps] for n, steps in one.items()}
    rows: list[Row] = []
    for length, mine in sorted({**blocks, 1: one}.items()):
        # AR decoded every prompt. Few prompts have blocks of one, and they must not decide which others count.
        prompts = [n for n in mine if n in one] if ar else sorted({*mine, *one})
        steps = [step for n in prompts for step in mine.get(n, ())]
        if not steps:
            continue
        row: Row = {
            "target": run.target.get("name"), "platform": platform.name, "tag": platform.tag,
            "experts": "in memory" if platform.name == RESIDENT else "loaded",
            "expert_width": platform.settings.get("expert_width"), "block_length": length,
            "one_token": AR if ar else BLOCKS_OF_ONE, "blocks": len(steps), "prompts": len({s.request for s in steps}),
            "unique_verify": _median(step.unique_verify for step in steps), "loaded": _median(map(_loaded, steps)),
        }  # fmt: skip
        pairs = [([step.verify_s for step in mine.get(n, ())], seconds.get(n, [])) for n in prompts]
        set_interval(row, "verify_cost", run.median_against(pairs))
        rows.append(row)
    return rows


def _by_prompt(platform: Measured, methods: Iterable[str]) -> dict[int, list[StepRecord]]:
    """Steps of all these methods together."""
    found: dict[int, list[StepRecord]] = {}
    for method in methods:
        for request, arm in platform.arms.get(method, {}).items():
            found.setdefault(request, []).extend(arm.steps)
    return found


def _lengths(by_prompt: dict[int, list[StepRecord]]) -> set[int]:
    return {step.drafted + 1 for steps in by_prompt.values() for step in steps}


def _of_length(by_prompt: dict[int, list[StepRecord]], length: int) -> dict[int, list[StepRecord]]:
    found = {n: [step for step in steps if step.drafted + 1 == length] for n, steps in by_prompt.items()}
    return {n: steps for n, steps in found.items() if steps}


def _loaded(step: StepRecord) -> float | None:
    """Experts that the step had to wait for or fetch; what drafting had left in memory is not among them."""
    for path in ("ar", "verify"):
        if f"{path}_demanded" in step.store:
            return step.store[f"{path}_demanded"] - step.store[f"{path}_hit"]
    return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _draw_verification(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    names = list(dict.fromkeys(str(row["platform"]) for row in rows))
    for place, name in enumerate(names):
        mine = [row for row in rows if row["platform"] == name]
        label = f"{name} ({mine[0]['tag']})"
        if mine[0]["experts"] == "in memory":
            label += "\nexperts in memory: in place\nof the paper's dense FFN"
        shift = 0.08 * (place - (len(names) - 1) / 2)  # intervals do not cover each other
        lengths = [number(row["block_length"]) + shift for row in mine]
        draw_series(axes, lengths, mine, "verify_cost", PLATFORM_LOOKS.get(name, OTHER_LOOK), label)
    axes.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(1, 1 + max(int(number(row["block_length"])) for row in rows)))
    axes.set_ylim(bottom=0)
    how = "medians over cycles without prefetch; bars: 95% interval over prompts, none for one"
    axes.set_xlabel(f"block length, tokens\n({how})")
    axes.set_ylabel("verification, times a one-token step")
    axes.grid(axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), handlelength=3.2, labelspacing=0.8)
