"""DraftExpert's figure 2: how good and how cheap drafts are, by drafter."""

from __future__ import annotations

from pathlib import Path

from moexp import metrics
from moexp.papers import load_paper
from moexp.tables.core import plot
from moexp.tables.core.plot import Axes, Figure, Look, Plot
from moexp.tables.core.provenance import provenance_lines, run_source
from moexp.tables.core.rows import of_steps, with_ends
from moexp.tables.core.table import Row, grouped, set_interval
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.draftexpert.data import Run, draft_cost, draft_counts
from moexp.tables.draftexpert.labels import AR, DRAFT_EXPERT, DRAFT_TOKENS, DRAFTERS

COLUMNS = ["panel", "target", "series", "drafter", *with_ends("acceptance", "draft_speedup"), "prompts", "tag"]
DECODING, HELD_OUT, PAPER_SERIES = f"decoding, K = {DRAFT_TOKENS}", f"held-out text, K = {DRAFT_TOKENS}", "paper"
LOOKS = plot.PLATFORM_LOOKS | {
    DECODING: Look(plot.BLUE, "o", "-"),
    HELD_OUT: Look(plot.GREEN, "^", "--"),
    PAPER_SERIES: plot.PAPER_LOOK,
}


def figure_2(run: Run, trace: Path | None) -> Plot | None:
    """(a) acceptance and (b) how many times a draft step is faster than an AR step, by drafter.

    Ours at K = 4, experts cold in (b); the paper's are averages over draft lengths that it does not name.

    Paper: DraftExpert Figure 2.
    """
    accepted, faster = _acceptance_rows(run), _speed_rows(run)
    if not accepted and not faster:
        return None
    rows = [*accepted, *_paper_rows("a", "acceptance"), *faster, *_paper_rows("b", "draft_speedup")]
    timed = {row["series"] for row in faster}
    measured = [] if run.resident is None else [run.resident]
    measured += [platform for platform in run.platforms if platform.name in timed]
    sources = provenance_lines(measured) if measured else [run_source(run.folder)]
    return Plot(
        "2", f"How good and how cheap drafts are ({run.target.get('name')})", COLUMNS, rows, _draw, 3.6, sources
    )


def _paper_rows(panel: str, name: str) -> list[Row]:
    return [
        {"panel": panel, "target": "", "series": PAPER_SERIES, "drafter": row["drafter"], name: row[name], "tag": PAPER}
        for row in load_paper("draftexpert").figures[2]["rows"]
    ]


def _acceptance_rows(run: Run) -> list[Row]:
    """Table 3's acceptance of full blocks, and that of blocks started from held-out text."""
    rows: list[Row] = []
    counts = {drafter: draft_counts(run, drafter, method) for drafter, method in DRAFTERS.items()}
    for series, name in ((DECODING, "acceptance"), (HELD_OUT, "acceptance_ctx")):
        for drafter, row in counts.items():
            if row[name] is not None:
                rows.append({
                    "panel": "a", "target": run.target.get("name"), "series": series, "drafter": drafter,
                    "prompts": row["prompts"] if series == DECODING else None, "tag": MEASURED,
                    **{f"acceptance{end}": row[name + end] for end in ("", "_lo", "_hi")},
                })  # fmt: skip
    return rows


def _speed_rows(run: Run) -> list[Row]:
    """One-token AR seconds over seconds a drafted token, on the same store in the same run."""
    rows: list[Row] = []
    for platform in run.platforms:
        ar = platform.arms.get(AR, {})
        for drafter, method in DRAFTERS.items():
            faster = run.against(ar, of_steps(metrics.token_time), platform.arms.get(method, {}), draft_cost)
            if faster.value is not None:
                row: Row = {"panel": "b", "target": run.target.get("name"), "series": platform.name}
                row |= {"drafter": drafter, "prompts": faster.prompts, "tag": platform.tag}
                set_interval(row, "draft_speedup", faster)
                rows.append(row)
    return rows


def _draw(figure: Figure, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    _draw_by_drafter(left, [row for row in rows if row["panel"] == "a"], "acceptance")
    left.set(ylim=(0, 1), ylabel="accepted over drafted tokens", title="(a) acceptance")
    _draw_by_drafter(right, [row for row in rows if row["panel"] == "b"], "draft_speedup")
    right.set_ylim(bottom=0)
    right.axhline(1, color=plot.BLACK, linewidth=0.8, linestyle=":")
    right.set(ylabel="AR step over draft step, times", title="(b) speed of drafting over the target, cold")


def _draw_by_drafter(axes: Axes, rows: list[Row], name: str) -> None:
    """A series each, joined along r; the draft experts stand apart."""
    drafters, series = list(DRAFTERS), grouped(rows, "series")
    for index, (one, points) in enumerate(series.items()):
        shift = 0.09 * (index - (len(series) - 1) / 2)  # intervals do not cover each other
        label = "paper, mean over lengths" if one == PAPER_SERIES else f"{one} ({points[0]['tag']})"
        for joined in (True, False):
            part = [row for row in points if (row["drafter"] != DRAFT_EXPERT) == joined]
            xs = [drafters.index(str(row["drafter"])) + shift for row in part]
            look = LOOKS.get(one, plot.OTHER_LOOK)
            plot.draw_series(axes, xs, part, name, look, label if joined else "_", joined=joined)
    axes.set_xticks(range(len(drafters)), drafters)
    axes.set(xlim=(-0.4, len(drafters) - 0.6), xlabel="drafter (bars: 95% interval)")
    axes.grid(axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=7.5, handlelength=3.2)
