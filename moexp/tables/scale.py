"""The table of a target larger than memory, from the figures of `moexp.bench.scale.run`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.table import Columns, Row, shown, to_csv, view_of, view_text

GOAL_RSS_GIB, GOAL_SHARE = 6.0, 0.8

COLUMNS = ["method", "tokens", "cycles", "tokens_per_s", "alpha", "experts_per_token", "bytes_per_token"]
COLUMNS += ["disk_bytes_s", "bound_tokens_per_s", "share_of_bound", "stall_share", "peak_rss_gib", "bit_exact", "tag"]


def write_scale(results: Path, figures: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Writes `scale.json` (raw), `scale.csv` and `scale.md`."""
    rows = [_row(figures, name) for name in figures["methods"]]
    atomic.write_json(results / "scale.json", {**figures, "provenance": provenance})
    atomic.write_text(results / "scale.csv", to_csv(COLUMNS, rows))
    atomic.write_text(results / "scale.md", _markdown(figures, rows, provenance))


def _row(figures: dict[str, Any], name: str) -> Row:
    one = figures["methods"][name]
    bandwidth = statistics.median(one["disk_bytes_s"])
    bytes_per_token = one["read_bytes"] / one["tokens"]
    rate = one["tokens"] / one["decode_s"]
    return {
        "method": name,
        "tokens": one["tokens"],
        "cycles": one["cycles"],
        "tokens_per_s": rate,
        "alpha": one["tokens"] / one["cycles"],
        "experts_per_token": one["demanded"] / one["tokens"],
        "bytes_per_token": bytes_per_token,
        "disk_bytes_s": bandwidth,
        "bound_tokens_per_s": bandwidth / bytes_per_token,
        "share_of_bound": rate * bytes_per_token / bandwidth,
        "stall_share": one["stall_s"] / one["decode_s"],
        "peak_rss_gib": figures["peak_rss_bytes"] / 2**30,
        "bit_exact": "yes" if one["bit_exact"] else "no",
        "tag": "measured",
    }


def _markdown(figures: dict[str, Any], rows: Sequence[Row], provenance: dict[str, Any]) -> str:
    columns: Columns = {
        "method": "method", "tokens/s": "tokens_per_s", "alpha": "alpha",
        "GB/token": shown("bytes_per_token", factor=1e-9), "bound, tokens/s": "bound_tokens_per_s",
        "share of bound": "share_of_bound", "stall": "stall_share", "bits of AR": "bit_exact",
    }  # fmt: skip
    gib = 2**30
    samples = [sample / 1e9 for one in figures["methods"].values() for sample in one["disk_bytes_s"]]
    parts = [
        "# A target larger than memory",
        f"{figures['checkpoint_bytes'] / 1e9:.1f} GB of random bf16 weights in the format of DeepSeek-V2-Lite; "
        f"{figures['experts']} routed experts of {figures['expert_bytes'] / 1e6:.2f} MB, "
        f"{figures['experts_per_token']} a token, "
        f"all read cold from disk; {figures['resident_bytes'] / gib:.2f} GiB of other weights in memory.",
        view_text(view_of("experts on disk (measured)", rows, columns)),
        f"Peak memory of the decoding process: {figures['peak_rss_bytes'] / gib:.2f} GiB (goal: at most "
        f"{GOAL_RSS_GIB:g}); after loading: {figures['loaded_rss_bytes'] / gib:.2f} GiB. Goal for AR's share of the "
        f"bound: {GOAL_SHARE:g}.",
        f"The bound is what {figures['io_threads']} threads get from {'O_DIRECT' if figures['direct'] else 'buffered'} "
        f"reads of {figures['read_bytes'] / 1e6:.2f} MB between its cycles ({min(samples):.2f} to {max(samples):.2f} "
        "GB/s; the median counts), over the bytes that a token demands. Weights are random, so alpha says nothing of "
        "real targets; that every row of logits has AR's bits does.",
        f"Provenance: {provenance_text([provenance], threads=figures['threads'])}.",
    ]
    return "\n\n".join(parts) + "\n"
