"""Acceptance by position in the draft, of each of DraftExpert's drafters on held-out text."""

from __future__ import annotations

from pathlib import Path

from moexp.tables.core.plot import (
    BLUE,
    GREEN,
    OTHER_LOOK,
    PURPLE,
    SKY,
    Figure,
    Look,
    Plot,
    counted_axis,
    draw_series,
    legend_beside,
)
from moexp.tables.core.provenance import run_source
from moexp.tables.core.table import Row, grouped, number
from moexp.tables.core.tags import MEASURED
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import DRAFT_EXPERT, TOP_R

DRAFTER_LOOKS = {
    TOP_R[1]: Look(SKY, "s", "--"),
    TOP_R[2]: Look(GREEN, "^", "-."),
    TOP_R[3]: Look(PURPLE, "D", ":"),
    DRAFT_EXPERT: Look(BLUE, "o", "-"),
}


def figure_acceptance(run: Run, trace: Path | None) -> Plot | None:
    """Share of blocks accepted up to each position, by drafter."""
    columns = ["target", "drafter", "position", "acceptance", "blocks", "tag"]
    rows: list[Row] = [
        {
            "target": run.target.get("name"), "drafter": drafter, "position": position, "acceptance": share,
            "blocks": held_out.get("blocks"), "tag": MEASURED,
        }
        for drafter, held_out in run.draft.items()
        for position, share in enumerate(held_out.get("by_position") or (), 1)
    ]  # fmt: skip
    if not rows:
        return None
    title = f"Acceptance by position in the draft, held-out text ({rows[0]['target']})"
    return Plot("acceptance", title, columns, rows, _draw, 3.6, [run_source(run.folder)])


def _draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    for drafter, points in grouped(rows, "drafter").items():
        positions = [number(row["position"]) for row in points]
        look = DRAFTER_LOOKS.get(drafter, OTHER_LOOK)
        draw_series(axes, positions, points, "acceptance", look, f"{drafter} ({points[0]['tag']})")
    counted_axis(axes, rows, "position")
    axes.set(ylim=(0, 1), xlabel="drafted position, tokens", ylabel="share of blocks accepted\nup to this position")
    legend_beside(axes)
