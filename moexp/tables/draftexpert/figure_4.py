"""DraftExpert's figure 4: what verifying a block costs, against its length."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from moexp.records import StepRecord
from moexp.tables.core.plot import BLACK, OTHER_LOOK, PLATFORM_LOOKS, Figure, Plot, draw_series
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, grouped, number, set_interval
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import AR, FIXED, RESIDENT, TOP_R, TRUNCATED

COLUMNS = ["target", "platform", "experts", "expert_width", "block_length", *with_ends("verify_cost"), "one_token"]
COLUMNS += ["unique_verify", "loaded", "blocks", "prompts", "tag"]

UNPREFETCHED = (TOP_R[1], FIXED, TRUNCATED)
"""Methods that draft with one expert a layer, and whose verification then loads itself what it still lacks."""

BLOCKS_OF_ONE = "blocks of one"

ByPrompt = dict[int, list[StepRecord]]


def figure_4(run: Run, trace: Path | None) -> Plot | None:
    """Verification of a block over a one-token step, against the block's tokens, by where the experts are.

    The paper's line for a dense FFN has no counterpart among MoE targets. In its place stands the same target with all
    experts in memory: a model whose weights need no loading, but which still computes every expert of the union.

    Paper: DraftExpert Figure 4.
    """
    platforms = [*run.platforms, *([] if run.resident is None else [run.resident])]
    by_platform = {platform.name: _rows(run, platform) for platform in platforms}
    rows = [row for platform_rows in by_platform.values() for row in platform_rows]
    if all(row["block_length"] == 1 for row in rows):
        return None
    sources = provenance_lines([platform for platform in platforms if by_platform[platform.name]])
    return Plot("4", f"What verifying a block costs ({run.target.get('name')})", COLUMNS, rows, _draw, 3.7, sources)


def _rows(run: Run, platform: Measured) -> list[Row]:
    """One row a block length. Costs are medians over cycles; the one-token step is AR's on the same store.

    Where AR was not run, it is that of blocks of one token: verifying one is the same computation.
    """
    ar, blocks = _by_length(platform, [AR]).get(1, {}), _by_length(platform, UNPREFETCHED)
    one = ar or blocks.get(1, {})
    if not one:
        return []
    seconds = {n: [step.cycle_s if ar else step.verify_s for step in steps] for n, steps in one.items()}
    rows: list[Row] = []
    for length, by_prompt in sorted({**blocks, 1: one}.items()):
        # AR decoded every prompt. Few prompts have blocks of one, and they must not decide which others count.
        prompts = [n for n in by_prompt if n in one] if ar else sorted({*by_prompt, *one})
        steps = [step for n in prompts for step in by_prompt.get(n, ())]
        if not steps:
            continue
        row = run.head(platform) | {
            "experts": "in memory" if platform.name == RESIDENT else "loaded",
            "expert_width": platform.settings.get("expert_width"), "block_length": length,
            "one_token": AR if ar else BLOCKS_OF_ONE, "blocks": len(steps), "prompts": len({s.request for s in steps}),
            "unique_verify": _median(step.unique_verify for step in steps), "loaded": _median(map(_loaded, steps)),
        }  # fmt: skip
        pairs = [([step.verify_s for step in by_prompt.get(n, ())], seconds.get(n, [])) for n in prompts]
        set_interval(row, "verify_cost", run.median_against(pairs))
        rows.append(row)
    return rows


def _by_length(platform: Measured, methods: Iterable[str]) -> dict[int, ByPrompt]:
    """Steps of all these methods together, by their blocks' tokens (one of AR)."""
    by_length: dict[int, ByPrompt] = {}
    for method in methods:
        for prompt, arm in platform.arms.get(method, {}).items():
            for step in arm.steps:
                by_length.setdefault(step.drafted + 1, {}).setdefault(prompt, []).append(step)
    return by_length


def _loaded(step: StepRecord) -> float | None:
    """Experts that the step had to wait for or fetch; what drafting had left in memory is not among them."""
    for path in ("ar", "verify"):
        if f"{path}_demanded" in step.store:
            return step.store[f"{path}_demanded"] - step.store[f"{path}_hit"]
    return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _draw(figure: Figure, rows: list[Row]) -> None:
    axes, series = figure.subplots(), grouped(rows, "platform")
    for index, (name, points) in enumerate(series.items()):
        label = f"{name} ({points[0]['tag']})"
        if points[0]["experts"] == "in memory":
            label += "\nexperts in memory: in place\nof the paper's dense FFN"
        shift = 0.08 * (index - (len(series) - 1) / 2)  # intervals do not cover each other
        lengths = [number(row["block_length"]) + shift for row in points]
        draw_series(axes, lengths, points, "verify_cost", PLATFORM_LOOKS.get(name, OTHER_LOOK), label)
    axes.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(1, 1 + max(int(number(row["block_length"])) for row in rows)))
    axes.set_ylim(bottom=0)
    how = "medians over cycles without prefetch; bars: 95% interval over prompts, none for one"
    axes.set_xlabel(f"block length, tokens\n({how})")
    axes.set_ylabel("verification, times a one-token step")
    axes.grid(axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), handlelength=3.2, labelspacing=0.8)
