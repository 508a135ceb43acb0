"""`moexp simulate`: AR and a recipe's methods on a platform, from recorded routing, as one table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moexp.base import atomic
from moexp.config.decode import DecodeSection
from moexp.metrics import Ratio, quotient
from moexp.runtime.store.policies import STATIC_HOT
from moexp.sim.machine.cycles import Cycle
from moexp.sim.machine.policies import BELADY
from moexp.sim.machine.run import Outcome, simulate
from moexp.sim.platforms.simulated import Simulated
from moexp.sim.routing.blocks import Blocks, Setting
from moexp.sim.routing.sources import Routing
from moexp.tables.core.table import Row, View, text, to_csv, view_text
from moexp.tables.core.tags import SIMULATED

COLUMNS = [
    "platform", "model", "source", "drafter", "method", "cache", "capacity", "max_draft", "policy", "tau", "budget",
    "prefetch", "prefetch_top", "tag", "tokens", "tokens_per_s", "speedup", "alpha", "hit", "prefetch_waste",
    "bytes_per_token", "compute_share",
]  # fmt: skip


def settings_of(decode: DecodeSection, longest: int) -> dict[str, Setting]:
    """Settings to simulate beside AR: the longest block and the recipe's truncation, each with and without prefetch."""
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
    """Simulates AR and the recipe's methods; with slots, also under the best possible cache policy."""
    blocks = routing.blocks(simulated.moe_layers)
    caches = [simulated.cache]
    if simulated.machine.capacity is not None and simulated.cache != "none":
        caches.append(BELADY)
    settings = settings_of(decode, blocks.longest)
    return [row for cache in caches for row in Arms(routing, blocks, simulated, cache).rows(settings.items())]


@dataclass(frozen=True)
class Arms:
    """Methods on one machine with one cache policy, and AR beside them."""

    routing: Routing
    blocks: Blocks
    simulated: Simulated
    cache: str

    def rows(self, settings: Iterable[tuple[str, Setting]]) -> list[Row]:
        """A row of AR, and one of each setting under its name."""
        ar = self._run(self.blocks.ar())
        rows = [self._common("ar") | _figures(ar, ar)]
        capacity = self.simulated.machine.capacity
        for name, setting in settings:
            outcome = self._run(self.blocks.cycles(setting, capacity))
            rows.append(self._common(name, setting) | _figures(outcome, ar))
        return rows

    def _run(self, cycles: Sequence[Cycle]) -> Outcome:
        demands = self.blocks.demands() if self.cache == STATIC_HOT else None
        return simulate(cycles, self.simulated.machine, self.cache, demands)

    def _common(self, name: str, setting: Setting | None = None) -> Row:
        """What a row is of."""
        source = self.routing.source
        row: Row = {
            "platform": self.simulated.platform,
            "model": self.simulated.model,
            "source": "/".join(source.path.parts[-2:]),  # the rest of the path means nothing elsewhere
            "drafter": self.routing.drafter if setting else None,
            "method": name,
            "cache": self.cache,
            "capacity": self.simulated.machine.capacity,
            "tag": SIMULATED + (", assumed acceptance" if source.is_trace and setting else ""),
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


def _figures(outcome: Outcome, ar: Outcome) -> Row:
    counted = outcome.counters
    return {
        "tokens": outcome.tokens,
        "tokens_per_s": outcome.tokens_per_s,
        "speedup": quotient(Ratio(outcome.tokens, outcome.seconds), Ratio(ar.tokens, ar.seconds)),
        "alpha": Ratio(outcome.tokens, outcome.cycles).value,
        "hit": Ratio(counted.hit + counted.late, counted.demanded).value,
        "prefetch_waste": Ratio(counted.wasted, counted.prefetched).value,
        "bytes_per_token": Ratio(counted.read_bytes, outcome.tokens).value,
        "compute_share": Ratio(outcome.compute_s, outcome.seconds).value,
    }


def write_study(folder: Path, rows: Sequence[Row], notes: Sequence[str]) -> list[Path]:
    """Writes `<platform>-<model>.csv` and `.md`; returns them."""
    path = folder / f"{rows[0]['platform']}-{rows[0]['model']}.csv"
    files = [path, path.with_suffix(".md")]
    atomic.write_text(files[0], to_csv(COLUMNS, rows))
    atomic.write_text(files[1], _markdown(rows, notes))
    return files


def _markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    first = rows[0]
    header = ["method", "cache", "tokens/s", "speedup", "alpha", "hit", "waste", "MB/token", "computing", "tag"]
    names = ("method", "cache", "tokens_per_s", "speedup", "alpha", "hit", "prefetch_waste")
    shown = [
        [
            *(text(row[name]) for name in names),
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
