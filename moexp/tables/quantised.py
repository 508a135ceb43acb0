"""The table of quantised experts, from the records of a run a platform and losses on held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.rows import Bootstrapped, sameness, throughput, with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Columns, Row, shown, to_csv, view_of, view_text

SPEEDS = {"tokens/s": "tokens_per_s", "speedup": "speedup", "alpha": "alpha"}
MEASURED_COLUMNS = with_ends("tokens_per_s", "speedup", "alpha", "bytes_per_token")
COLUMNS = ["target", "platform", "precision", "method", "tag", "prompts", "identical", *MEASURED_COLUMNS]
COLUMNS += ["held_out_nats", "held_out_tokens"]


def write_quantised(
    results: Path,
    target: str,
    runs: Sequence[Measured],
    precisions: Mapping[str, str],
    loss: Mapping[str, Any],
    samples: int,
) -> list[Path]:
    """Writes `<results>/<target>/quantised.csv` and `.md`; returns both.

    Args:
        runs: of the platforms; a method is called by its precision and its name.
        precisions: as methods are called by them -> as they are shown.
        loss: precision -> {nats, tokens}.
        samples: of the bootstrap.
    """  # fmt: skip
    rows = [row for run in runs for row in _rows(target, run, precisions, loss, samples)]
    path = results / target / "quantised.csv"
    atomic.write_text(path, to_csv(COLUMNS, rows))
    atomic.write_text(path.with_suffix(".md"), _markdown(target, runs, rows))
    return [path, path.with_suffix(".md")]


def _rows(
    target: str, run: Measured, precisions: Mapping[str, str], loss: Mapping[str, Any], samples: int
) -> list[Row]:
    rows: list[Row] = []
    for label, arms in run.arms.items():
        precision, method = label.split(" ", 1)
        ar = run.arms[f"{precision} ar"]
        arms = {request: arms[request] for request in sorted(arms.keys() & ar.keys())}
        measured = throughput(Bootstrapped(samples=samples), arms, None if method == "ar" else ar, 1)
        rows.append({
            "target": target,
            "platform": run.name,
            "precision": precisions[precision],
            "method": method,
            "tag": run.tag,
            "prompts": len(arms),
            "identical": sameness(arms, ar, 0.0)["identical"],
            **{column: measured[column] for column in MEASURED_COLUMNS},
            "held_out_nats": loss[precision]["nats"],
            "held_out_tokens": loss[precision]["tokens"],
        })  # fmt: skip
    order = list(precisions.values())
    return sorted(rows, key=lambda row: (order.index(str(row["precision"])), row["method"] != "ar"))


def _markdown(target: str, runs: Sequence[Measured], rows: Sequence[Row]) -> str:
    columns: Columns = {
        "experts": "precision",
        "method": "method",
        "MB/token": shown("bytes_per_token", 1, factor=1e-6),
        **{name: shown(column, ends=True) for name, column in SPEEDS.items()},
        "tokens of AR": "identical",
        "held-out nats": shown("held_out_nats", 3),
    }
    parts = [f"# Quantised experts of `{target}`"]
    for run in runs:
        of_run = [row for row in rows if row["platform"] == run.name]
        parts.append(view_text(view_of(f"{run.name} ({run.tag})", of_run, columns)))
    invocations = [invocation for run in runs for invocation in run.provenance]
    threads = runs[-1].settings.get("threads") if runs else None
    parts += [
        "Each precision is a target of its own: `speedup` is over its own AR, and `tokens of AR` counts the prompts "
        "whose tokens are those of its own AR. Blocks are llama.cpp's, written by the `gguf` package and dequantised "
        "when an expert arrives; MB/token are bytes as packed. All precisions share one link and take turns. Loss is "
        f"of {rows[0]['held_out_tokens'] if rows else 0} tokens of held-out text.",
        f"Provenance: {provenance_text(invocations, threads=threads)}.",
    ]
    return "\n\n".join(parts) + "\n"
