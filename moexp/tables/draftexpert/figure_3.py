"""DraftExpert's figure 3: which experts drafting touches, against the draft's length."""

from __future__ import annotations

from pathlib import Path

from moexp import metrics
from moexp.metrics import Ratio
from moexp.papers import load_paper
from moexp.tables.core.plot import BLACK, Figure, Look, Plot, counted_axis, draw_series, legend_beside
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, number, set_interval
from moexp.tables.core.tags import PAPER
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.figure_acceptance import DRAFTER_LOOKS
from moexp.tables.draftexpert.labels import DRAFT_TOKENS, DRAFTERS

COLUMNS = ["target", "platform", "drafter", "steps", *with_ends("unique_draft"), "cycles", "prompts", "tag"]


def figure_3(run: Run, trace: Path | None) -> Plot | None:
    """Unique routed layer-experts that drafting touched, against the draft's tokens, by drafter.

    From the run with every expert in memory where there is one: counts do not depend on the platform.

    Paper: DraftExpert Figure 3.
    """
    for measured in (run.resident, *run.platforms):
        rows = [] if measured is None else _rows(run, measured)
        if measured is not None and len({row["steps"] for row in rows}) > 1:
            size = f"{run.target.get('name')}, {run.target.get('moe_layers')} MoE layers"
            title, sources = f"Experts that drafting touches ({size})", provenance_lines([measured])
            return Plot("3", title, COLUMNS, rows + _paper_rows(), _draw, 3.7, sources)
    return None


def _rows(run: Run, measured: Measured) -> list[Row]:
    """One row a drafter and length; the methods keep what every step drafts."""
    rows: list[Row] = []
    for drafter, method in DRAFTERS.items():
        unions: dict[int, dict[int, list[int]]] = {}  # tokens drafted -> prompt -> experts of each cycle
        for prompt, arm in measured.arms.get(method, {}).items():
            for step in arm.steps:
                if step.drafted and step.unique_draft is not None:
                    unions.setdefault(step.drafted, {}).setdefault(prompt, []).append(step.unique_draft)
        for drafted, by_prompt in sorted(unions.items()):
            row = run.head(measured) | {"drafter": drafter, "steps": drafted, "prompts": len(by_prompt)}
            row["cycles"] = sum(map(len, by_prompt.values()))
            ratios = [Ratio(sum(counts), len(counts)) for counts in by_prompt.values()]
            set_interval(row, "unique_draft", metrics.bootstrap(ratios, samples=run.samples))
            rows.append(row)
    return rows


def _paper_rows() -> list[Row]:
    """The paper's at K = 4, of the target that its first figure is of; its figure 3 has no numbers in the text."""
    paper = load_paper("draftexpert")
    rows = [row for row in paper.table(3).rows if row["target"] == paper.figures[1]["weights_of"]]
    return [
        {"target": row["target"], "drafter": row["drafter"], "steps": DRAFT_TOKENS,
         "unique_draft": row["unique_draft"], "tag": PAPER}
        for row in rows
        if row["platform"] == rows[0]["platform"]
    ]  # fmt: skip


def _draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    for index, drafter in enumerate(DRAFTERS):
        points = [row for row in rows if row["drafter"] == drafter and row["tag"] != PAPER]
        if points:
            xs = [number(row["steps"]) + 0.05 * (index - 1.5) for row in points]  # two of the lines all but coincide
            label = f"{drafter} ({points[0]['tag']})"
            draw_series(axes, xs, points, "unique_draft", DRAFTER_LOOKS[drafter], label)
    for index, row in enumerate(row for row in rows if row["tag"] == PAPER):
        look = Look(BLACK, DRAFTER_LOOKS[str(row["drafter"])].marker, hollow=True)
        label = "_" if index else f"paper, {row['target']}, table 3:\nthe same markers, hollow"
        x = number(row["steps"]) + 0.2 + 0.05 * index
        draw_series(axes, [x], [row], "unique_draft", look, label, joined=False)
    counted_axis(axes, rows, "steps")
    axes.set_xlabel("tokens drafted (bars: 95% interval over prompts, none for one prompt)")
    axes.set_ylabel("unique layer-experts")
    legend_beside(axes)
