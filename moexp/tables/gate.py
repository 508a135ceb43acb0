"""The exactness gate's results: files, a table for the terminal, and the verdict in words."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from moexp.base import atomic
from moexp.tables.core.table import to_csv
from moexp.tables.core.tags import MEASURED

if TYPE_CHECKING:
    from moexp.bench.exactness import Gate

CSV, JSON = "eval.csv", "eval.json"


def write_gate(gate: Gate, folder: Path, identity: str, provenance: dict[str, Any]) -> list[Path]:
    """Writes `eval.csv` and `eval.json`; returns both."""
    rows = gate_rows(gate)
    atomic.write_text(folder / CSV, to_csv(list(rows[0]), rows))
    atomic.write_json(folder / JSON, {
        "identity": identity,
        "passed": gate.passed,
        "row_invariant": gate.invariant,
        "near_tie_gap": gate.near_tie_gap,
        "outcomes": [asdict(outcome) | {"tier": gate.tier(outcome)} for outcome in gate.outcomes],
        "provenance": provenance,
    })  # fmt: skip
    return [folder / CSV, folder / JSON]


def gate_rows(gate: Gate) -> list[dict[str, Any]]:
    """The gate as a table; what does not exist is empty."""
    rows: list[dict[str, Any]] = []
    for outcome in gate.outcomes:
        tier, first = gate.tier(outcome), outcome.first
        gap = None if first is None else first.gap
        rows.append({
            "dtype": outcome.dtype,
            "store": outcome.store,
            "target": outcome.target,
            "method": outcome.method,
            "prompts": outcome.prompts,
            "tokens": outcome.tokens,
            "logits_rows": outcome.rows,
            "differing_rows": outcome.differing,
            "requests_apart": len(outcome.apart),
            "first_mismatch": "" if first is None else f"{first.prompt}:{first.position}",
            "gap": "" if gap is None else f"{gap:.3g}",
            "tier": "FAILED" if tier is None else tier,
            "tag": MEASURED,
        })  # fmt: skip
    return rows


def gate_table(gate: Gate) -> Table:
    """What was compared, by method; where it ran stands once, above all methods that follow."""
    rows = gate_rows(gate)
    mismatches = any(row["first_mismatch"] for row in rows)
    table = Table("method", box=None, pad_edge=False, title="Exactness (measured)", title_justify="left")
    for name in ("prompts", "tokens", "rows", "differ", "tier"):
        table.add_column(name, justify="right")
    if mismatches:
        table.add_column("first mismatch")
    last = None
    for row in rows:
        here = f"{row['dtype']}, {row['store']} store" + (", padded experts" if row["target"] == "padded" else "")
        if here != last:
            table.add_row(f"[bold]{here}[/]")
            last = here
        gap = f" gap {row['gap']}" if row["gap"] else ""
        table.add_row(
            "  " + row["method"].replace("confidence-expansion", "conf-exp"),
            *(str(row[name]) for name in ("prompts", "tokens", "logits_rows", "differing_rows", "tier")),
            *([f"{row['first_mismatch']}{gap}"] if mismatches else []),
        )
    return table


def gate_lines(gate: Gate) -> list[str]:
    """The verdict in words."""
    lines = []
    for dtype, invariant in gate.invariant.items():
        if not invariant:
            lines.append(
                f"{dtype}: this backend is not row-invariant, so bits may differ; tokens may where the target's own "
                f"top-2 gap is below {gate.near_tie_gap:g} (near ties, tier 2)"
            )
    tokens = sum(outcome.tokens for outcome in gate.outcomes)
    rows = sum(outcome.rows for outcome in gate.outcomes)
    ties = sum(len(outcome.apart) for outcome in gate.outcomes if gate.tier(outcome) == 2)
    if not gate.passed:
        failed = sum(gate.tier(outcome) is None for outcome in gate.outcomes)
        lines.append(f"FAILED: {failed} of {len(gate.outcomes)} methods differ from AR")
    elif any(gate.tier(outcome) == 2 for outcome in gate.outcomes):
        lines.append(f"near-tie tier: {tokens} tokens, {ties} requests part from AR, all at near ties")
    else:
        lines.append(f"exact: {tokens} tokens, {rows} logits rows, every bit as AR has it")
    return lines
