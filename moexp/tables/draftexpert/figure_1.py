"""DraftExpert's figure 1: experts' share of the weights, and of plain decoding the waiting for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moexp import metrics
from moexp.metrics import Ratio
from moexp.papers import load_paper
from moexp.tables.core.plot import BLACK, LIGHT, SKY, Axes, Figure, Plot, draw_interval
from moexp.tables.core.provenance import provenance_lines, run_source
from moexp.tables.core.rows import steps_of, with_ends
from moexp.tables.core.run import ArmRecords
from moexp.tables.core.table import Row, grouped, number, set_interval
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import AR

GIB = 2**30

COLUMNS = ["panel", "target", "expert_width", "padded", "routed_gib", "rest_gib", "routed_share", "active_share"]
COLUMNS += ["platform", *with_ends("wait_share"), "wait_ms", "token_ms", "prompts", "tag"]


def figure_1(run: Run, trace: Path | None) -> Plot | None:
    """(a) GiB of weights by part, (b) share of AR's decoding time that waits for experts, by platform.

    Paper: DraftExpert Figure 1.
    """
    weights, waits = _weight_rows(run), _wait_rows(run)
    if not weights and not waits:
        return None
    measured = [platform for platform in run.platforms if platform.name in {row["platform"] for row in waits}]
    sources = provenance_lines(measured) if measured else [run_source(run.folder)]
    title = f"Offloaded experts: their share of the weights, and waiting for them ({run.target.get('name')})"
    return Plot("1", title, COLUMNS, [*weights, *waits], _draw, 1.3 + 0.5 * max(len(weights), len(waits)), sources)


def _weight_rows(run: Run) -> list[Row]:
    """Our target, its padded copy, and the paper's target; none before our own sizes are known."""
    rows: list[Row] = [
        {
            "panel": "a", "target": run.target["name"], "expert_width": sizes["expert_width"], "padded": copy > 0,
            "routed_gib": sizes["routed_bytes"] / GIB, "rest_gib": sizes["rest_bytes"] / GIB,
            "routed_share": sizes["routed_bytes"] / (sizes["routed_bytes"] + sizes["rest_bytes"]),
            "active_share": run.target["top_k"] / run.target["num_experts"], "tag": MEASURED,
        }
        for copy, sizes in enumerate(run.target.get("weights", ()))
    ]  # fmt: skip
    if rows:
        paper = load_paper("draftexpert").figures[1]
        rows.append({
            "panel": "a", "target": paper["weights_of"], "routed_gib": paper["routed_bf16_gib"],
            "rest_gib": paper["non_routed_gib"], "routed_share": paper["routed_share"], "tag": PAPER,
        })  # fmt: skip
    return rows


def _wait_rows(run: Run) -> list[Row]:
    """One row a platform whose store counted AR's stalls."""
    rows: list[Row] = []
    for platform in run.platforms:
        arms = platform.arms.get(AR, {})
        steps = steps_of(arms)
        wait, token = metrics.time_profile(steps)["verify_wait"].value, metrics.token_time(steps).value
        if wait is None or token is None or not all("ar_stall_s" in step.store for step in steps):
            continue
        row = run.head(platform) | {"panel": "b", "expert_width": platform.settings.get("expert_width")}
        row |= {"prompts": len(arms), "wait_ms": 1000 * wait, "token_ms": 1000 * token}
        set_interval(row, "wait_share", run.over(arms, _wait_share))
        rows.append(row)
    return rows


def _wait_share(arm: ArmRecords) -> Ratio:
    """Seconds of stalls over seconds of decoding."""
    return Ratio(metrics.time_profile(arm.steps)["verify_wait"].num, metrics.token_time(arm.steps).num)


def _draw(figure: Figure, rows: list[Row]) -> None:
    panels = grouped(rows, "panel")
    for axes, (panel, panel_rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        (_draw_weights if panel == "a" else _draw_waits)(axes, panel_rows)
        axes.set(xlim=(0, 100), ylim=(len(panel_rows) - 0.6, -0.75), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=2, handlelength=1.6)


def _draw_weights(axes: Axes, rows: list[Row]) -> None:
    _draw_shares(axes, [number(row["routed_share"]) for row in rows], "routed experts", "all other weights")
    for y, row in enumerate(rows):
        width = "" if row.get("expert_width") is None else f", experts {row['expert_width']} wide"
        name = f"{row['target']}{width}{' (padded)' if row.get('padded') else ''}, {row['tag']}"
        sizes = f"{number(row['routed_gib']):.3g} + {number(row['rest_gib']):.3g} GiB"
        axes.text(0, y - 0.26, f"{name}: {sizes}", va="bottom", fontsize=7.5)
    axes.set(title="(a) weights", xlabel="share of the bytes, %")


def _draw_waits(axes: Axes, rows: list[Row]) -> None:
    _draw_shares(axes, [number(row["wait_share"]) for row in rows], "waiting for experts", "all other time")
    for y, row in enumerate(rows):
        times = f"{number(row['wait_ms']):.0f} of {number(row['token_ms']):.0f} ms a token"
        axes.text(0, y - 0.26, f"{row['platform']}, {row['tag']}: {times}", va="bottom", fontsize=7.5)
        draw_interval(axes, row, "wait_share", y, factor=100, color=BLACK, linewidth=1.6, marker="|", markersize=6)
    axes.set(title="(b) time of AR decoding", xlabel="share of the time, % (black: 95% interval)")


def _draw_shares(axes: Axes, shares: Sequence[float], first: str, second: str) -> None:
    """Bars of two parts; the first is `shares`, from 0 to 1."""
    left, ys = [100 * share for share in shares], range(len(shares))
    axes.barh(ys, left, 0.4, color=SKY, label=first)
    axes.barh(ys, [100 - share for share in left], 0.4, left=left, color=LIGHT, hatch="////", label=second)
