"""The table of peers, from the figures of `moexp.bench.peers.run`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.table import Columns, Row, shown, text, to_csv, view_of, view_text

LABELS = {
    "moexp": "moexp, disk store",
    "accelerate": "transformers + accelerate, disk offload",
    "llama.cpp": "llama.cpp, mmap",
}
GOALS = {"accelerate": 10.0, "llama.cpp": 1.5}
"""How many times as fast moexp is meant to be."""

COLUMNS = ["engine", "version", "prompts", "tokens", "tokens_per_s", "tokens_per_s_lo", "tokens_per_s_hi", "token_ms"]
COLUMNS += ["bytes_per_token", "needed_bytes", "bytes_per_s", "moexp_ratio", "moexp_ratio_lo", "moexp_ratio_hi"]
COLUMNS += ["same_tokens", "tag"]


def write_peers(results: Path, raw: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Writes `peers.json` (raw), `peers.csv` and `peers.md`."""
    rows = [row_of(raw, engine) for engine in raw["engines"]]
    atomic.write_json(results / "peers.json", {**raw, "provenance": provenance})
    atomic.write_text(results / "peers.csv", to_csv(COLUMNS, rows))
    atomic.write_text(results / "peers.md", markdown(raw, rows, provenance))


def answer_rate(answer: Mapping[str, Any]) -> float:
    """Tokens a second of an engine's answer to a prompt."""
    return len(answer["seconds"]) / sum(answer["seconds"])


def row_of(raw: Mapping[str, Any], engine: str) -> Row:
    """An engine's figures: medians over prompts, and the lowest and highest; ratios are of the same prompt."""
    answers = raw["engines"][engine]
    rates = [answer_rate(answer) for answer in answers]
    seconds = [second for answer in answers for second in answer["seconds"]]
    read = [count for answer in answers for count in answer["read_bytes"]]
    row: Row = {
        "engine": engine, "version": raw["versions"][engine], "prompts": len(answers), "tokens": len(seconds),
        "tokens_per_s": statistics.median(rates), "tokens_per_s_lo": min(rates), "tokens_per_s_hi": max(rates),
        "token_ms": 1e3 * statistics.median(seconds), "bytes_per_token": sum(read) / len(read),
        "needed_bytes": raw["needed_bytes"], "bytes_per_s": sum(read) / sum(seconds), "tag": "measured",
    }  # fmt: skip
    own = raw["engines"].get("moexp")
    if own:
        ratios = [answer_rate(answer) / rate for answer, rate in zip(own, rates, strict=True)]
        pairs = [zip(a["ids"], b["ids"], strict=True) for a, b in zip(own, answers, strict=True)]
        same = [a == b for pair in pairs for a, b in pair]
        row |= {"moexp_ratio": statistics.median(ratios), "moexp_ratio_lo": min(ratios), "moexp_ratio_hi": max(ratios)}
        row["same_tokens"] = sum(same) / len(same)
    return row


def markdown(raw: Mapping[str, Any], rows: Sequence[Row], provenance: Mapping[str, Any]) -> str:
    """The table for reading."""
    columns: Columns = {
        "engine": lambda row: LABELS[str(row["engine"])],
        "tokens/s": shown("tokens_per_s", ends=True),
        "MB read a token": shown("bytes_per_token", 0, factor=1e-6),
        "GB/s": shown("bytes_per_s", factor=1e-9),
        "moexp is": lambda row: f"{text(row['moexp_ratio'])}x" if row.get("moexp_ratio") else "",
        "goal": lambda row: f"{GOALS[str(row['engine'])]:g}x" if row["engine"] in GOALS else "",
        "same tokens": "same_tokens",
    }
    first = rows[0]
    parts = [
        "# Peers: AR decoding with cold experts",
        f"The weights of `{raw['target']}` in bf16: {raw['experts_per_token']} experts of "
        f"{raw['expert_bytes'] / 1e6:.2f} MB a token, {raw['needed_bytes'] / 1e6:.0f} MB in all; {first['prompts']} "
        f"prompts, {int(first['tokens'] or 0) // int(first['prompts'] or 1)} tokens each, {raw['threads']} threads; "
        "one engine after the other for each prompt, in changing order.",
        view_text(view_of("decoding, median (lowest..highest) of the prompts (measured)", rows, columns)),
        "Before each token, pages of routed experts are given back to the system, from the peers' mappings and from "
        f"the page cache, so that they come from the disk as moexp's do ({raw['io_threads']} threads, O_DIRECT). "
        "Prefill and that are not timed. Bytes are what the system counts for the process; accelerate loads all "
        "experts of a layer, and a mapping brings in what the system reads ahead "
        f"({raw.get('read_ahead_kb') or 'an unknown number of'} KB here; Linux's default is 128). Tokens are ids, "
        "chosen greedily; kernels differ, so near-ties may fall elsewhere, and what follows then differs too.",
        f"{'; '.join(str(row['version']) for row in rows)}.",
        f"Provenance: {provenance_text([dict(provenance)], threads=raw['threads'])}.",
    ]
    return "\n\n".join(parts) + "\n"
