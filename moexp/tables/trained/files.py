"""What a recipe's target, draft experts and predictor were measured to be, for `results/`: JSON in full, Markdown and
CSV to read.

Imports no torch: it reads what `build-target`, `train-draft-expert` and `train-predictor` left beside their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moexp.base.atomic import write_json, write_text
from moexp.metrics import Ratio, bootstrap
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.table import Columns, Row, View, shown, to_csv, view_of, view_text
from moexp.tables.trained.rows import draft_rows, predictor_rows, quality_view

DRAFT_COLUMNS = (
    "drafter", "agreement", "kl", "router_agreement", "acceptance_ctx", "accepted_1", "accepted_2", "accepted_3",
    "accepted_4", "unique_draft", "blocks", "tag",
)  # fmt: skip

PREDICTOR_COLUMNS = ("predictor", "layer", "hits", "slots", "overlap", "tag")


def write_target_summary(folder: Path, name: str, manifest: dict[str, Any]) -> list[Path]:
    """Writes `target.json` and `target.md`: quality on held-out text by stage, and answers a person can judge."""
    geometry, repair = manifest["geometry"], manifest.get("repair") or {}
    shape = (
        f"{geometry['shared_neurons']} shared neurons and {geometry['routed_experts']} routed experts of width "
        f"{geometry['expert_width']}, top-{geometry['top_k']}; carved from {manifest['origin']}."
    )
    if "tokens" in repair:
        shape += f" Repaired with a corpus of {repair['tokens']:,} tokens."
    if manifest.get("delta"):
        shape += f" Rebuilt from the delta `{manifest['delta']}`."
    answers = [
        f"- **{answer['question']}** {' '.join(answer['answer'].split())}" for answer in manifest.get("answers", [])
    ]
    parts = [
        f"# The target of `{name}`", shape, view_text(quality_view(manifest["quality"])),
        "Greedy answers in chat format:", "\n".join(answers),
    ]  # fmt: skip
    return _write(folder / "target", manifest, parts)


def write_draft_summary(folder: Path, name: str, header: dict[str, Any]) -> list[Path]:
    """Writes `draft_experts.json`, `.csv` and `.md`: each drafter on held-out text."""
    metrics, rows = header["metrics"], draft_rows(header["metrics"])
    columns: Columns = {
        "drafter": "drafter", "agreement": shown("agreement", 3), "KL": shown("kl", 3),
        "router": shown("router_agreement", 3), "acceptance_ctx": shown("acceptance_ctx", 3),
        "by position": lambda row: " ".join(f"{share:.2f}" for share in metrics[row["drafter"]]["by_position"]),
        "unique": shown("unique_draft", 1),
    }  # fmt: skip
    tokens = (header.get("training") or {}).get("tokens", 0)
    parts = [
        f"# Draft experts of `{name}`",
        f"Width {header['width']}, trained with a corpus of {tokens:,} tokens.",
        view_text(view_of("on held-out text, K = 4, T = 0 (measured)", rows, columns)),
        *_lead_over_top_r(metrics),
        "`agreement`, KL (nats) and `router` (mean top-k overlap) are teacher-forced; `acceptance_ctx` is accepted / "
        "drafted of blocks started from held-out text, the target's keys and values before them; `unique` counts "
        "layer-experts that a drafted block used.",
    ]
    return _write(folder / "draft_experts", header, parts, DRAFT_COLUMNS, rows)


def _lead_over_top_r(metrics_by_drafter: dict[str, Any]) -> list[str]:
    """How far the draft experts' `acceptance_ctx` is above each top-r's; paired, the contexts being the same."""
    draft_experts = metrics_by_drafter.get("draft-expert", {}).get("per_row", ())
    leads = []
    for drafter, values in metrics_by_drafter.items():
        top_r = values.get("per_row", ())
        if drafter != "draft-expert" and draft_experts and len(draft_experts) == len(top_r):
            lead = bootstrap([Ratio(one - other, 1) for one, other in zip(draft_experts, top_r, strict=True)])
            ends = "" if lead.lo is None else f" ({lead.lo:+.3f}..{lead.hi:+.3f})"
            leads.append(f"{lead.value:+.3f}{ends} over {drafter}")
    if not leads:
        return []
    blocks = metrics_by_drafter["draft-expert"]["blocks"]
    return [f"`acceptance_ctx` of the draft experts, paired over {blocks} blocks: {', '.join(leads)}."]


def write_predictor_summary(folder: Path, name: str, header: dict[str, Any]) -> list[Path]:
    """Writes `predictor.json`, `.csv` (each predictor by layer, layer `all` last) and `.md`."""
    metrics, training, rows = header["metrics"], header["training"], predictor_rows(header["metrics"])
    overlaps = {(row["layer"], row["predictor"]): f"{row['overlap']:.3f}" for row in rows}
    names = list(metrics["hits"])
    lines = [[str(layer), *(overlaps[layer, each] for each in names)] for layer in ["all", *metrics["layers"]]]
    levels = ", ".join(f"`{level}` at {reached:.3f}" for level, reached in metrics["levels"].items()) or "none"
    title = f"top-{metrics['top_k']} overlap, {metrics['tokens']:,} tokens of {metrics['samples']:,} held-out samples"
    parts = [
        f"# Expert predictor of `{name}`",
        f"{training['parameters']:,} parameters, {header['backbone']['model_type']} backbone; {training['steps']:,} "
        f"steps on {training['tokens']:,} tokens of routing trace.",
        view_text(View(f"{title} (measured)", ["layer", *names], lines)),
        "Overlap is the share of the target router's top-k experts that were predicted. `context-free` goes by the "
        "token id alone, `previous-token` repeats the experts of the token before. Checkpoints kept on the way: "
        f"{levels}.",
    ]
    return _write(folder / "predictor", header, parts, PREDICTOR_COLUMNS, rows)


def _write(
    stem: Path, raw: dict[str, Any], parts: Sequence[str], columns: Sequence[str] = (), rows: Sequence[Row] = ()
) -> list[Path]:
    """Writes `stem` as JSON, as CSV where it has columns, and as Markdown with its provenance; returns the files."""
    files = [stem.with_suffix(f".{kind}") for kind in (("json", "csv", "md") if columns else ("json", "md"))]
    write_json(files[0], raw)
    if columns:
        write_text(files[1], to_csv(columns, rows))
    write_text(files[-1], "\n\n".join([*parts, f"Provenance: {provenance_text([raw['provenance']])}."]) + "\n")
    return files
