"""What a recipe's target, draft experts and predictor were measured to be, for `results/`: JSON in full, Markdown and
CSV to read.

Imports no torch: it reads what `build-target`, `train-draft-expert` and `train-predictor` left beside their weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moexp.base.atomic import write_json, write_text
from moexp.metrics import Ratio, bootstrap
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.table import Row, View, to_csv, view_text
from moexp.tables.core.tags import MEASURED

DRAFT_COLUMNS = (
    "drafter", "agreement", "kl", "router_agreement", "acceptance_ctx", "accepted_1", "accepted_2", "accepted_3",
    "accepted_4", "unique_draft", "blocks", "tag",
)  # fmt: skip

PREDICTOR_COLUMNS = ("predictor", "layer", "hits", "slots", "overlap", "tag")


def write_target_summary(folder: Path, name: str, manifest: dict[str, Any]) -> list[Path]:
    """Writes `target.json` and `target.md`: quality on held-out text by stage, and answers a person can judge."""
    quality, repair = manifest["quality"], manifest.get("repair") or {}
    geometry = manifest["geometry"]
    stages = list(quality)
    last = quality[stages[-1]]
    rows = []
    for place, routed in enumerate(last["nats"]):
        dense = f"{last['dense_nats']:.3f}" if place == 0 else ""
        rows.append([f"nats a token, {routed}", dense, *(f"{quality[stage]['nats'][routed]:.3f}" for stage in stages)])
    rows += [
        ["KL from the dense model (nats)", "", *(f"{quality[stage]['kl']:.3f}" for stage in stages)],
        ["agreement with it", "", *(f"{quality[stage]['agreement']:.3f}" for stage in stages)],
        ["dead experts", "", *(str(sum(quality[stage]["dead_experts"])) for stage in stages)],
        ["busiest expert's load / mean", "", *(f"{quality[stage]['max_load']:.2f}" for stage in stages)],
    ]
    shape = (
        f"{geometry['shared_neurons']} shared neurons and {geometry['routed_experts']} routed experts of width "
        f"{geometry['expert_width']}, top-{geometry['top_k']}; carved from {manifest['origin']}."
    )
    trained = f" Repaired with a corpus of {repair['tokens']:,} tokens." if "tokens" in repair else ""
    delta = f" Rebuilt from the delta `{manifest['delta']}`." if manifest.get("delta") else ""
    answers = [f"- **{answer['question']}** {_quoted(answer['answer'])}" for answer in manifest.get("answers", [])]
    table = view_text(View(f"on {last['tokens']:,} held-out tokens (measured)", ["", "dense", *stages], rows))
    parts = [
        f"# The target of `{name}`", shape + trained + delta, table,
        "Greedy answers in chat format:", "\n".join(answers), _origin(manifest["provenance"]),
    ]  # fmt: skip
    files = [folder / "target.json", folder / "target.md"]
    write_json(files[0], manifest)
    write_text(files[1], "\n\n".join(parts) + "\n")
    return files


def write_draft_summary(folder: Path, name: str, header: dict[str, Any]) -> list[Path]:
    """Writes `draft_experts.json`, `.csv` and `.md`: each drafter on held-out text."""
    rows: list[Row] = []
    for drafter, found in header["metrics"].items():
        rows.append(
            {
                "drafter": drafter,
                **{key: found[key] for key in ("agreement", "kl", "router_agreement", "unique_draft", "blocks")},
                "acceptance_ctx": found["acceptance"],
                **{f"accepted_{place}": share for place, share in enumerate(found["by_position"][:4], start=1)},
                "tag": MEASURED,
            }
        )
    header_cells = ["drafter", "agreement", "KL", "router", "acceptance_ctx", "by position", "unique"]
    shown = [
        [
            str(row["drafter"]), f"{row['agreement']:.3f}", f"{row['kl']:.3f}", f"{row['router_agreement']:.3f}",
            f"{row['acceptance_ctx']:.3f}",
            " ".join(f"{share:.2f}" for share in header["metrics"][row["drafter"]]["by_position"]),
            f"{row['unique_draft']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    training = header.get("training") or {}
    parts = [
        f"# Draft experts of `{name}`",
        f"Width {header['width']}, trained with a corpus of {training.get('tokens', 0):,} tokens.",
        view_text(View("on held-out text, K = 4, T = 0 (measured)", header_cells, shown)),
        *_lead_over_top_r(header["metrics"]),
        "`agreement`, KL (nats) and `router` (mean top-k overlap) are teacher-forced; `acceptance_ctx` is accepted / "
        "drafted of blocks started from held-out text, the target's keys and values before them; `unique` counts "
        "layer-experts that a drafted block used.",
        _origin(header["provenance"]),
    ]
    files = [folder / f"draft_experts.{kind}" for kind in ("json", "csv", "md")]
    write_json(files[0], header)
    write_text(files[1], to_csv(DRAFT_COLUMNS, rows))
    write_text(files[2], "\n\n".join(parts) + "\n")
    return files


def _lead_over_top_r(metrics_by_drafter: dict[str, Any]) -> list[str]:
    """How far the draft experts' `acceptance_ctx` is above each top-r's; paired, the contexts being the same."""
    ours = metrics_by_drafter.get("draft-expert", {}).get("per_row", ())
    leads = []
    for drafter, found in metrics_by_drafter.items():
        theirs = found.get("per_row", ())
        if drafter != "draft-expert" and ours and len(ours) == len(theirs):
            lead = bootstrap([Ratio(mine - other, 1) for mine, other in zip(ours, theirs, strict=True)])
            ends = "" if lead.lo is None else f" ({lead.lo:+.3f}..{lead.hi:+.3f})"
            leads.append(f"{lead.value:+.3f}{ends} over {drafter}")
    if not leads:
        return []
    blocks = metrics_by_drafter["draft-expert"]["blocks"]
    return [f"`acceptance_ctx` of the draft experts, paired over {blocks} blocks: {', '.join(leads)}."]


def write_predictor_summary(folder: Path, name: str, header: dict[str, Any]) -> list[Path]:
    """Writes `predictor.json`, `.csv` (each predictor by layer, layer `all` last) and `.md`."""
    metrics, training = header["metrics"], header["training"]
    slots = metrics["tokens"] * metrics["top_k"]
    rows: list[Row] = []
    for predictor, hits_L in metrics["hits"].items():
        by_layer = zip([*metrics["layers"], "all"], [*hits_L, sum(hits_L)], strict=True)
        for layer, hits in by_layer:
            of = slots * len(hits_L) if layer == "all" else slots
            row: Row = {"predictor": predictor, "layer": layer, "hits": hits, "slots": of, "overlap": hits / of}
            rows.append({**row, "tag": MEASURED})
    by_place = {(row["layer"], row["predictor"]): f"{row['overlap']:.3f}" for row in rows}
    names = list(metrics["hits"])
    shown = [[str(layer), *(by_place[layer, each] for each in names)] for layer in ["all", *metrics["layers"]]]
    levels = ", ".join(f"`{level}` at {reached:.3f}" for level, reached in metrics["levels"].items()) or "none"
    backbone = header["backbone"]["model_type"]
    title = f"top-{metrics['top_k']} overlap, {metrics['tokens']:,} tokens of {metrics['samples']:,} held-out samples"
    parts = [
        f"# Expert predictor of `{name}`",
        f"{training['parameters']:,} parameters, {backbone} backbone; {training['steps']:,} steps on "
        f"{training['tokens']:,} tokens of routing trace.",
        view_text(View(f"{title} (measured)", ["layer", *names], shown)),
        "Overlap is the share of the target router's top-k experts that were predicted. `context-free` goes by the "
        "token id alone, `previous-token` repeats the experts of the token before. Checkpoints kept on the way: "
        f"{levels}.",
        _origin(header["provenance"]),
    ]
    files = [folder / f"predictor.{kind}" for kind in ("json", "csv", "md")]
    write_json(files[0], header)
    write_text(files[1], to_csv(PREDICTOR_COLUMNS, rows))
    write_text(files[2], "\n\n".join(parts) + "\n")
    return files


def _quoted(answer: str) -> str:
    return " ".join(answer.split())


def _origin(provenance: dict[str, Any]) -> str:
    return f"Provenance: {provenance_text([provenance])}."
