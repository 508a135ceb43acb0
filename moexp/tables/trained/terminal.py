"""What commands print of their results: tables for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from moexp.tables.core.table import Columns, Row, View, grouped, number, shown, view_of
from moexp.tables.trained.rows import Quality, draft_rows, predictor_rows, quality_view

if TYPE_CHECKING:
    from moexp.learn.trace.trace import TraceReport

SHOWN_LAYERS = 6  # most uneven layers in the table of expert load; the file has all


def terminal_table(view: View, *, names: int = 1) -> Table:
    """A view without borders; all columns but the first `names` are numbers, to the right."""
    table = Table(box=None, pad_edge=False, title=view.title, title_justify="left")
    for index, heading in enumerate(view.header):
        table.add_column(heading, justify="left" if index < names else "right", no_wrap=index >= names)
    for row in view.rows:
        table.add_row(*row)
    return table


def quality_table(quality: Quality) -> Table:
    """Held-out quality of the target by stage (carved, repaired), beside the dense model's."""
    return terminal_table(quality_view(quality, short=True))


def load_table(report: TraceReport) -> Table:
    """Expert load over all layers and in the most uneven ones."""
    load, layers = report.load, report.trace.geometry.layers
    uneven = sorted(sorted(range(len(layers)), key=lambda index: -load.most_L[index])[:SHOWN_LAYERS])
    rows = [["all", f"{load.least_L.min():.2f}", f"{load.most_L.max():.2f}", str(int(load.dead_L.sum()))]]
    for index in uneven:
        least, most, dead = load.least_L[index], load.most_L[index], load.dead_L[index]
        rows.append([str(layers[index]), f"{least:.2f}", f"{most:.2f}", str(int(dead))])
    header = ["layer", "least / mean", "most / mean", "dead experts"]
    return terminal_table(View("Expert load (measured)", header, rows))


def growth_table(report: TraceReport) -> Table:
    """Experts a layer that a block touches, beside what uniform routing would."""
    growth, rows = report.growth, []
    for index, blocks in enumerate(growth.blocks_B.tolist()):
        uniform, unique = float(growth.uniform_B[index]), float(growth.mean_B[index])
        cells = (f"{unique:.1f}", f"{unique / uniform:.0%}") if blocks else ("", "")
        rows.append([str(index + 1), cells[0], f"{uniform:.1f}", cells[1]])
    header = ["block length", "experts a layer", "uniform", "of uniform"]
    return terminal_table(View("Union growth (measured; DraftExpert, Figure 5)", header, rows), names=0)


def draft_table(metrics: dict[str, dict[str, Any]]) -> Table:
    """Drafters on held-out text: teacher-forced agreement, and blocks of K = 4 behind the target's own KV."""
    columns: Columns = {
        "drafter": "drafter", "agreement": shown("agreement", 3), "KL": shown("kl", 3),
        "router": shown("router_agreement", 3), "acceptance_ctx": shown("acceptance_ctx", 3),
        "unique_draft": shown("unique_draft", 1),
    }  # fmt: skip
    return terminal_table(view_of("on held-out text, K = 4, T = 0 (measured)", draft_rows(metrics), columns))


def predictor_table(metrics: dict[str, Any]) -> Table:
    """Top-k overlap of the expert predictor and of the baselines, over all layers and in the worst and best one."""
    rows = []
    for predictor, by_layer in grouped(predictor_rows(metrics), "predictor").items():
        *overlaps, total = (number(row["overlap"]) for row in by_layer)
        rows.append([predictor, *(f"{value:.3f}" for value in (total, min(overlaps), max(overlaps)))])
    rows += [[f"checkpoint {name}", f"{overlap:.3f}", "", ""] for name, overlap in metrics["levels"].items()]
    title = f"Overlap of top-{metrics['top_k']} on {metrics['tokens']} held-out tokens (measured)"
    return terminal_table(View(title, ["predictor", "all layers", "worst layer", "best layer"], rows))


def head_table(kind: str, metrics: dict[str, float]) -> Table:
    """A draft head on held-out text, by draft step: how often its likeliest token is the target's, sum of min(p, q)."""
    names = [name for name in ("acceptance", "overlap") if f"{name}_1" in metrics]
    rows, step = list[Row](), 1
    while f"acceptance_{step}" in metrics:
        rows.append({"step": str(step), **{name: metrics[f"{name}_{step}"] for name in names}})
        step += 1
    columns: Columns = {"draft step": "step", **{name: shown(name, 3) for name in names}}
    return terminal_table(view_of(f"{kind} on held-out text (measured)", rows, columns))
