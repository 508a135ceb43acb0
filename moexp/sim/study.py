"""`moexp simulate`: AR and a recipe's methods on a platform, from recorded routing, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moexp.base import atomic
from moexp.config.decode import DecodeSection
from moexp.sim.adapt import Simulated
from moexp.sim.blocks import Blocks, Setting
from moexp.sim.simulate import BELADY, Outcome, simulate
from moexp.sim.sources import Routing
from moexp.tables.core.table import Row, View, text, to_csv, view_text
from moexp.tables.core.tags import SIMULATED

COLUMNS = [
    "platform", "model", "source", "drafter", "method", "cache", "capacity", "max_draft", "policy", "tau", "budget",
    "prefetch", "prefetch_top", "tag", "tokens", "tokens_per_s", "speedup", "alpha", "hit", "prefetch_waste",
    "bytes_per_token", "compute_share",
]  # fmt: skip


def settings_of(decode: DecodeSection, longest: int) -> dict[str, Setting]:
    """What is simulated beside AR: the longest block, the recipe's truncation without prefetch, and all of it."""
    fixed = Setting(max_draft=longest)
    tuned = Setting(
        min(decode.max_draft, longest),
        "confidence-expansion",
        decode.tau,
        decode.budget,
        prefetch_top=decode.prefetch_top,
    )
    return {
        f"fixed K{longest}": fixed,
        f"fixed K{longest}, prefetch": replace(fixed, prefetch=True),
        "truncated": tuned,
        "truncated, prefetch": replace(tuned, prefetch=True),
    }


def study(routing: Routing, simulated: Simulated, decode: DecodeSection) -> list[Row]:
    """Simulates AR and the recipe's methods; with slots, also what the best cache policy could reach."""
    blocks = routing.blocks(simulated.moe_layers)
    caches = [simulated.cache]
    if simulated.machine.capacity is not None and simulated.cache != "none":
        caches.append(BELADY)
    rows: list[Row] = []
    for cache in caches:
        base = outcome(blocks, None, simulated, cache)
        rows.append(row_of(routing, simulated, "ar", None, cache, base, base))
        for name, setting in settings_of(decode, blocks.longest).items():
            found = outcome(blocks, setting, simulated, cache)
            rows.append(row_of(routing, simulated, name, setting, cache, found, base))
    return rows


def outcome(blocks: Blocks, setting: Setting | None, simulated: Simulated, cache: str) -> Outcome:
    """One run; without a setting, AR."""
    capacity = simulated.machine.capacity
    cycles = blocks.ar() if setting is None else blocks.cycles(setting, capacity)
    return simulate(cycles, simulated.machine, cache, blocks.demands() if cache == "static-hot" else None)


def row_of(
    routing: Routing,
    simulated: Simulated,
    name: str,
    setting: Setting | None,
    cache: str,
    found: Outcome,
    ar: Outcome | None,
) -> Row:
    """One line of the table.

    Args:
        ar: plain decoding with the same cache and link.
    """
    row: Row = {
        "platform": simulated.platform,
        "model": simulated.model,
        "source": "/".join(routing.source.place.parts[-2:]),  # where it lies is nobody else's business
        "drafter": routing.drafter if setting else None,
        "method": name,
        "cache": cache,
        "capacity": simulated.machine.capacity,
        "tag": SIMULATED + (", assumed acceptance" if routing.source.is_trace and setting else ""),
        "tokens": found.tokens,
        "tokens_per_s": found.tokens_per_s,
        "speedup": found.tokens_per_s / ar.tokens_per_s if ar and ar.tokens_per_s and found.tokens_per_s else None,
        "alpha": found.alpha,
        "hit": found.hit,
        "prefetch_waste": found.prefetch_waste,
        "bytes_per_token": found.bytes_per_token,
        "compute_share": found.compute_s / found.seconds if found.seconds else None,
    }
    if setting is not None:
        row |= {
            "max_draft": setting.max_draft,
            "policy": setting.policy,
            "prefetch": "yes" if setting.prefetch else "no",
        }
        if setting.policy != "fixed":
            row |= {"tau": setting.tau, "budget": setting.budget}
        if setting.prefetch:
            row["prefetch_top"] = setting.prefetch_top
    return row


def write_study(folder: Path, rows: Sequence[Row], notes: Sequence[str]) -> list[Path]:
    """Writes `<platform>-<model>.csv` and `.md`; returns them."""
    path = folder / f"{rows[0]['platform']}-{rows[0]['model']}.csv"
    files = [path, path.with_suffix(".md")]
    atomic.write_text(files[0], to_csv(COLUMNS, rows))
    atomic.write_text(files[1], markdown(rows, notes))
    return files


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table for reading; every figure in it is simulated."""
    first = rows[0]
    header = ["method", "cache", "tokens/s", "speedup", "alpha", "hit", "waste", "MB/token", "computing", "tag"]
    shown = [
        [
            *(
                text(row[name])
                for name in ("method", "cache", "tokens_per_s", "speedup", "alpha", "hit", "prefetch_waste")
            ),
            text(float(row["bytes_per_token"] or 0) / 1e6, 1),
            text(row["compute_share"]),
            text(row["tag"]),
        ]
        for row in rows
    ]
    capacity = "what one cycle needs" if first["capacity"] is None else f"{first['capacity']} experts"
    parts = [
        f"# {first['model']} on {first['platform']}, simulated",
        view_text(View("", header, shown)),
        f"From the routing in `{first['source']}`; slots: {capacity}. Nothing here was measured.",
        *notes,
    ]
    return "\n\n".join(parts) + "\n"
