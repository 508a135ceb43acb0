"""What commands print of their results: tables for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from moexp.learn.trace.trace import TraceReport

SHOWN_LAYERS = 6  # most uneven layers in the table of expert load; the file has all


def quality_table(quality: dict[str, dict[str, Any]]) -> Table:
    """Held-out quality of the target by stage (carved, repaired), beside the dense model's."""
    stages = list(quality)
    last = quality[stages[-1]]
    table = Table(
        box=None, pad_edge=False, title=f"on {last['tokens']} held-out tokens (measured)", title_justify="left"
    )
    table.add_column("")
    for name in ("dense", *stages):
        table.add_column(name, justify="right")
    for place, name in enumerate(last["nats"]):
        dense = f"{last['dense_nats']:.2f}" if place == 0 else ""
        table.add_row(f"nats a token, {name}", dense, *(f"{quality[stage]['nats'][name]:.2f}" for stage in stages))
    table.add_row("KL from dense (nats)", "", *(f"{quality[stage]['kl']:.2f}" for stage in stages))
    table.add_row("agreement with dense", "", *(f"{quality[stage]['agreement']:.2f}" for stage in stages))
    table.add_row("dead experts", "", *(str(sum(quality[stage]["dead_experts"])) for stage in stages))
    table.add_row("busiest expert's load / mean", "", *(f"{quality[stage]['max_load']:.1f}" for stage in stages))
    return table


def load_table(report: TraceReport) -> Table:
    """Expert load over all layers and in the most uneven ones."""
    load, layers = report.load, report.trace.geometry.layers
    uneven = sorted(range(len(layers)), key=lambda place: -load.most_L[place])[:SHOWN_LAYERS]
    table = Table("layer", box=None, pad_edge=False, title="Expert load (measured)", title_justify="left")
    for name in ("least / mean", "most / mean", "dead experts"):
        table.add_column(name, justify="right")
    table.add_row("all", f"{load.least_L.min():.2f}", f"{load.most_L.max():.2f}", str(int(load.dead_L.sum())))
    for place in sorted(uneven):
        table.add_row(
            str(layers[place]),
            f"{load.least_L[place]:.2f}",
            f"{load.most_L[place]:.2f}",
            str(int(load.dead_L[place])),
        )
    return table


def growth_table(report: TraceReport) -> Table:
    """Experts a layer that a block touches, beside what uniform routing would."""
    growth = report.growth
    title = "Union growth (measured; DraftExpert, Figure 5)"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in ("block length", "experts a layer", "uniform", "of uniform"):
        table.add_column(name, justify="right")
    for place, blocks in enumerate(growth.blocks_B.tolist()):
        uniform = float(growth.uniform_B[place])
        unique = float(growth.mean_B[place]) if blocks else None
        shown = ("", "") if unique is None else (f"{unique:.1f}", f"{unique / uniform:.0%}")
        table.add_row(str(place + 1), shown[0], f"{uniform:.1f}", shown[1])
    return table


def draft_table(metrics: dict[str, dict[str, Any]]) -> Table:
    """Drafters on held-out text: teacher-forced agreement, and blocks of K = 4 behind the target's own KV."""
    table = Table(
        "drafter", box=None, pad_edge=False, title="on held-out text, K = 4, T = 0 (measured)", title_justify="left"
    )
    columns = {
        "agreement": ("agreement", "{:.3f}"),
        "kl": ("KL", "{:.3f}"),
        "router_agreement": ("router", "{:.3f}"),
        "acceptance": ("acceptance_ctx", "{:.3f}"),
        "unique_draft": ("unique_draft", "{:.1f}"),
    }
    for name, _ in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    for drafter, values in metrics.items():
        shown = (form.format(values[key]) if values.get(key) is not None else "" for key, (_, form) in columns.items())
        table.add_row(drafter, *shown)
    return table


def predictor_table(metrics: dict[str, Any]) -> Table:
    """Top-k overlap of the expert predictor and of the baselines, over all layers and in the worst and best one."""
    title = f"Overlap of top-{metrics['top_k']} on {metrics['tokens']} held-out tokens (measured)"
    table = Table("predictor", box=None, pad_edge=False, title=title, title_justify="left")
    for name in ("all layers", "worst layer", "best layer"):
        table.add_column(name, justify="right")
    slots = metrics["tokens"] * metrics["top_k"]
    for name, hits_L in metrics["hits"].items():
        table.add_row(
            name, *(f"{value:.3f}" for value in (metrics["overlap"][name], min(hits_L) / slots, max(hits_L) / slots))
        )
    for name, reached in metrics["levels"].items():
        table.add_row(f"checkpoint {name}", f"{reached:.3f}", "", "")
    return table


def head_table(kind: str, metrics: dict[str, float]) -> Table:
    """A draft head on held-out text, by draft step: how often its likeliest token is the target's, sum of min(p, q)."""
    table = Table(
        "draft step", box=None, pad_edge=False, title=f"{kind} on held-out text (measured)", title_justify="left"
    )
    names = [name for name in ("acceptance", "overlap") if f"{name}_1" in metrics]
    for name in names:
        table.add_column(name, justify="right")
    step = 1
    while f"acceptance_{step}" in metrics:
        table.add_row(str(step), *(f"{metrics[f'{name}_{step}']:.3f}" for name in names))
        step += 1
    return table
