"""What was measured on targets, draft experts and predictors, as rows and views that files and terminals share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moexp.tables.core.table import Row, View
from moexp.tables.core.tags import MEASURED

Quality = Mapping[str, Mapping[str, Any]]
"""Stage (carved, repaired) -> what the target is worth on held-out text."""


def quality_view(quality: Quality, *, short: bool = False) -> View:
    """Held-out quality of the target by stage, beside the dense model's; `short` has fewer digits and shorter names."""
    stages, digits = list(quality.values()), 2 if short else 3

    def row(name: str, values: Iterable[float], places: int = digits) -> list[str]:
        return [name, "", *(f"{value:.{places}f}" for value in values)]

    rows = [row(f"nats a token, {name}", (stage["nats"][name] for stage in stages)) for name in stages[-1]["nats"]]
    rows[0][1] = f"{stages[-1]['dense_nats']:.{digits}f}"
    rows += [
        row("KL from dense (nats)" if short else "KL from the dense model (nats)", (stage["kl"] for stage in stages)),
        row("agreement with dense" if short else "agreement with it", (stage["agreement"] for stage in stages)),
        row("dead experts", (sum(stage["dead_experts"]) for stage in stages), 0),
        row("busiest expert's load / mean", (stage["max_load"] for stage in stages), digits - 1),
    ]
    tokens = stages[-1]["tokens"]
    shown = str(tokens) if short else f"{tokens:,}"
    return View(f"on {shown} held-out tokens (measured)", ["", "dense", *quality], rows)


def draft_rows(metrics_by_drafter: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Drafters on held-out text: teacher-forced agreement, and blocks of K = 4 behind the target's own KV."""
    names = ("agreement", "kl", "router_agreement", "unique_draft", "blocks")
    return [
        {
            "drafter": drafter,
            **{name: values.get(name) for name in names},
            "acceptance_ctx": values.get("acceptance"),
            **{f"accepted_{n}": share for n, share in enumerate(values.get("by_position", ())[:4], start=1)},
            "tag": MEASURED,
        }
        for drafter, values in metrics_by_drafter.items()
    ]


def predictor_rows(metrics: Mapping[str, Any]) -> list[Row]:
    """Top-k overlap of the expert predictor and of the baselines, by layer; layer `all` last."""
    slots, rows = metrics["tokens"] * metrics["top_k"], list[Row]()
    for predictor, hits_L in metrics["hits"].items():
        counts = [*zip(metrics["layers"], hits_L, [slots] * len(hits_L), strict=True)]
        for layer, hits, total in [*counts, ("all", sum(hits_L), slots * len(hits_L))]:
            row: Row = {"predictor": predictor, "layer": layer, "hits": hits, "slots": total, "overlap": hits / total}
            rows.append({**row, "tag": MEASURED})
    return rows
