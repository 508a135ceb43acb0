"""DraftExpert's figures 2 and 3: how good and how cheap drafts are, and which experts they touch. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moexp import metrics
from moexp.metrics import Ratio
from moexp.papers import load_paper
from moexp.tables.core.plot import (
    BLACK,
    BLUE,
    GREEN,
    OTHER_LOOK,
    PAPER_LOOK,
    PLATFORM_LOOKS,
    PURPLE,
    SKY,
    Look,
    Plot,
    draw_series,
    legend_beside,
    number,
    run_source,
)
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, set_interval
from moexp.tables.core.tags import MEASURED, PAPER
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import AR, DRAFT_TOKENS, FIXED, TOP_R
from moexp.tables.draftexpert.quality import draft_cost, draft_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "draft-expert"
DRAFTERS = {**{name: name for name in TOP_R.values()}, OURS: FIXED}
"""Drafter -> the method that drafts `DRAFT_TOKENS` with it in every block."""

DRAFTER_LOOKS = {
    "top-1": Look(SKY, "s", "--"),
    "top-2": Look(GREEN, "^", "-."),
    "top-3": Look(PURPLE, "D", ":"),
    OURS: Look(BLUE, "o", "-"),
}

DECODING, HELD_OUT, PAPER_SERIES = f"decoding, K = {DRAFT_TOKENS}", f"held-out text, K = {DRAFT_TOKENS}", "paper"
SERIES_LOOKS = {DECODING: Look(BLUE, "o", "-"), HELD_OUT: Look(GREEN, "^", "--"), PAPER_SERIES: PAPER_LOOK}


# --- figure 2 ---


def tradeoff(run: Run, folder: Path, _: Path | None) -> Plot | None:
    """Figure 2: (a) acceptance and (b) how many times a draft step is faster than an AR step, by drafter.

    Ours at K = 4, experts cold in (b); the paper's are averages over draft lengths that it does not name.
    """
    accepted, faster = _acceptance_rows(run), _speed_rows(run)
    if not accepted and not faster:
        return None
    theirs: list[Row] = [
        {"panel": panel, "target": "", "series": PAPER_SERIES, "drafter": row["drafter"], name: row[name], "tag": PAPER}
        for panel, name in (("a", "acceptance"), ("b", "draft_speedup"))
        for row in load_paper("draftexpert").figures[2]["rows"]
    ]
    rows = [row for panel in "ab" for row in [*accepted, *faster, *theirs] if row["panel"] == panel]
    columns = ["panel", "target", "series", "drafter", *with_ends("acceptance", "draft_speedup"), "prompts", "tag"]
    used = {row["series"] for row in faster}
    measured = [] if run.resident is None else [run.resident]
    measured += [platform for platform in run.platforms if platform.name in used]
    sources = provenance_lines(measured) if measured else [run_source(folder)]
    return Plot(
        "2",
        f"How good and how cheap drafts are ({run.target.get('name')})",
        columns,
        rows,
        _draw_tradeoff,
        3.6,
        sources,
    )


def _acceptance_rows(run: Run) -> list[Row]:
    """Table 3's acceptance of whole blocks, and that of blocks started from held-out text."""
    rows: list[Row] = []
    for series, name in ((DECODING, "acceptance"), (HELD_OUT, "acceptance_ctx")):
        for drafter, method in DRAFTERS.items():
            counts = draft_counts(run, drafter, method)
            if counts[name] is not None:
                row: Row = {"panel": "a", "target": run.target.get("name"), "series": series, "drafter": drafter}
                row |= {"prompts": counts["prompts"] if series == DECODING else None, "tag": MEASURED}
                rows.append(row | {f"acceptance{end}": counts[name + end] for end in ("", "_lo", "_hi")})
    return rows


def _speed_rows(run: Run) -> list[Row]:
    """One-token AR seconds over seconds a drafted token, on the same store in the same run."""
    rows: list[Row] = []
    for platform in run.platforms:
        ar = platform.arms.get(AR, {})
        for drafter, method in DRAFTERS.items():
            arms = platform.arms.get(method, {})
            found = run.against(ar, lambda arm: metrics.token_time(arm.steps), arms, draft_cost)
            if found.value is not None:
                row: Row = {"panel": "b", "target": run.target.get("name"), "series": platform.name}
                row |= {"drafter": drafter, "prompts": found.prompts, "tag": platform.tag}
                set_interval(row, "draft_speedup", found)
                rows.append(row)
    return rows


def _draw_tradeoff(figure: Figure, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    _draw_by_drafter(left, [row for row in rows if row["panel"] == "a"], "acceptance")
    left.set_ylim(0, 1)
    left.set_ylabel("accepted over drafted tokens")
    left.set_title("(a) acceptance")
    _draw_by_drafter(right, [row for row in rows if row["panel"] == "b"], "draft_speedup")
    right.set_ylim(bottom=0)
    right.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
    right.set_ylabel("AR step over draft step, times")
    right.set_title("(b) speed of drafting over the target, cold")


def _draw_by_drafter(axes: Axes, rows: list[Row], name: str) -> None:
    """A series each, joined along r; the draft experts stand apart."""
    names = list(DRAFTERS)
    series = list(dict.fromkeys(str(row["series"]) for row in rows))
    for place, one in enumerate(series):
        mine = [row for row in rows if row["series"] == one]
        look = {**SERIES_LOOKS, **PLATFORM_LOOKS}.get(one, OTHER_LOOK)
        shift = 0.09 * (place - (len(series) - 1) / 2)  # intervals do not cover each other
        label = "paper, mean over lengths" if one == PAPER_SERIES else f"{one} ({mine[0]['tag']})"
        for joined in (True, False):
            part = [row for row in mine if (row["drafter"] != OURS) == joined]
            places = [names.index(str(row["drafter"])) + shift for row in part]
            draw_series(axes, places, part, name, look, label if joined else "_", joined=joined)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.4, len(names) - 0.6)
    axes.set_xlabel("drafter (bars: 95% interval)")
    axes.grid(axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=7.5, handlelength=3.2)


# --- figure 3 ---


class DraftUnion(NamedTuple):
    """Layer-experts that the first `steps` draft steps of one cycle touched together."""

    drafter: str
    request: int
    steps: int
    unique_draft: int


def draft_unions(measured: Measured) -> Iterator[DraftUnion]:
    """What is known of the unions of drafting in a run. A record has one a cycle: that of all its steps."""
    for drafter, method in DRAFTERS.items():
        for request, arm in measured.arms.get(method, {}).items():
            for step in arm.steps:
                if step.drafted and step.unique_draft is not None:  # these methods keep what every step drafts
                    yield DraftUnion(drafter, request, step.drafted, step.unique_draft)


def expansion(run: Run, _: Path, __: Path | None) -> Plot | None:
    """Figure 3: unique routed layer-experts that drafting touched, against the draft's tokens, by drafter.

    From the run with every expert in memory where there is one: counts do not depend on the platform.
    """
    for measured in (run.resident, *run.platforms):
        rows = [] if measured is None else _expansion_rows(run, measured)
        if measured is not None and len({row["steps"] for row in rows}) > 1:
            columns = ["target", "platform", "drafter", "steps", *with_ends("unique_draft"), "cycles", "prompts", "tag"]
            title = (
                f"Experts that drafting touches ({run.target.get('name')}, {run.target.get('moe_layers')} MoE layers)"
            )
            rows += _their_unions()
            return Plot("3", title, columns, rows, _draw_expansion, 3.7, provenance_lines([measured]))
    return None


def _expansion_rows(run: Run, measured: Measured) -> list[Row]:
    by_place: dict[tuple[str, int], dict[int, list[int]]] = {}
    for one in draft_unions(measured):
        by_place.setdefault((one.drafter, one.steps), {}).setdefault(one.request, []).append(one.unique_draft)
    rows: list[Row] = []
    order = list(DRAFTERS)
    for (drafter, steps), by_prompt in sorted(by_place.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        row: Row = {"target": run.target.get("name"), "platform": measured.name, "drafter": drafter, "steps": steps}
        ratios = [Ratio(sum(unions), len(unions)) for unions in by_prompt.values()]
        set_interval(row, "unique_draft", metrics.bootstrap(ratios, samples=run.samples))
        row |= {"cycles": sum(map(len, by_prompt.values())), "prompts": len(by_prompt), "tag": measured.tag}
        rows.append(row)
    return rows


def _their_unions() -> list[Row]:
    """The paper's at K = 4, of the target that its first figure is of; its figure 3 has no numbers in the text."""
    paper = load_paper("draftexpert")
    rows = [row for row in paper.table(3).rows if row["target"] == paper.figures[1]["weights_of"]]
    return [
        {"target": row["target"], "drafter": row["drafter"], "steps": DRAFT_TOKENS,
         "unique_draft": row["unique_draft"], "tag": PAPER}
        for row in rows
        if row["platform"] == rows[0]["platform"]
    ]  # fmt: skip


def _draw_expansion(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    theirs = [row for row in rows if row["tag"] == PAPER]
    for place, drafter in enumerate(DRAFTERS):
        mine = [row for row in rows if row["drafter"] == drafter and row["tag"] != PAPER]
        if mine:
            places = [number(row["steps"]) + 0.05 * (place - 1.5) for row in mine]  # two of the lines all but coincide
            label = f"{drafter} ({mine[0]['tag']})"
            draw_series(axes, places, mine, "unique_draft", DRAFTER_LOOKS[drafter], label)
    for place, row in enumerate(theirs):
        look = Look(BLACK, DRAFTER_LOOKS[str(row["drafter"])].marker, hollow=True)
        label = "_" if place else f"paper, {row['target']}, table 3:\nthe same markers, hollow"
        at = number(row["steps"]) + 0.2 + 0.05 * place
        draw_series(axes, [at], [row], "unique_draft", look, label, joined=False)
    axes.set_xticks(sorted({int(number(row["steps"])) for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens drafted (bars: 95% interval over prompts, none for one prompt)")
    axes.set_ylabel("unique layer-experts")
    axes.grid(axis="y")
    legend_beside(axes)
