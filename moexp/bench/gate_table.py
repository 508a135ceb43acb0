"""The exactness gate as a table for the terminal, and its verdict in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from moexp.bench.exactness import Gate


def gate_table(gate: Gate) -> Table:
    """What was compared, by method; where it ran is said once for all methods that follow."""
    from moexp.bench.gate import gate_rows

    rows = list(gate_rows(gate))
    mismatches = any(row["first_mismatch"] for row in rows)
    table = Table("method", box=None, pad_edge=False, title="Exactness (measured)", title_justify="left")
    for name in ("prompts", "tokens", "rows", "differ", "tier"):
        table.add_column(name, justify="right")
    if mismatches:
        table.add_column("first mismatch")
    place = None
    for row in rows:
        here = f"{row['dtype']}, {row['store']} store" + (", padded experts" if row["target"] == "padded" else "")
        if here != place:
            table.add_row(f"[bold]{here}[/]")
            place = here
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
