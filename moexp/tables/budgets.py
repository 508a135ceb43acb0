"""The cache budgets' table and figure: what was measured, and the same recordings replayed by the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.base import atomic
from moexp.metrics import Ratio
from moexp.runtime.store.policies import STATIC_HOT
from moexp.sim.validation.replay import Comparison
from moexp.tables.core.plot import BLUE, GREEN, ORANGE, PURPLE, Look, Plot, write_plot
from moexp.tables.core.provenance import run_source
from moexp.tables.core.table import Row, View, number, text, to_csv, view_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = [
    "policy", "budget_percent", "method", "tag", "cycles", "tokens", "seconds", "tokens_per_s", "demanded", "hits",
    "missed", "hit_rate", "bytes_per_token", "counters",
]  # fmt: skip
LOOKS = {
    "lru": Look(BLUE, "o", "-"),
    "lfu": Look(ORANGE, "s", "--"),
    "least-stale": Look(GREEN, "^", "-."),
    STATIC_HOT: Look(PURPLE, "D", ":"),
}
NOTE = (
    "Budget: part of the routed experts that may stay. tokens/s, hits and bytes are measured, those headed "
    "`simulated` are a replay of the recorded run. Every line's store begins empty and is filled by the prompt's "
    "prefill. Hits: demanded experts in memory or on their way. Counters: equal in every cycle, or the number of "
    "cycles in which each is not; with prefetch and a cache they depend on when transfers land."
)


def budget_rows(policy: str, percent: int, comparisons: Iterable[Comparison]) -> list[Row]:
    """A measured and a simulated row of each method under one budget."""
    return [_row(policy, percent, comparison, which) for comparison in comparisons for which in (0, 1)]


def _row(policy: str, percent: int, one: Comparison, which: int) -> Row:
    counts = {name: both[which] for name, both in one.counts.items()}
    seconds = (one.measured_s, one.simulated_s)[which]
    return {
        "policy": policy,
        "budget_percent": percent,
        "method": one.method,
        "tag": ("measured", "simulated")[which],
        "cycles": one.cycles,
        "tokens": one.tokens,
        "seconds": seconds,
        "tokens_per_s": Ratio(one.tokens, seconds).value,
        "demanded": counts["demanded"],
        "hits": counts["covered"],
        "missed": counts["missed"],
        "hit_rate": Ratio(counts["covered"], counts["demanded"]).value,
        "bytes_per_token": Ratio(counts["read_bytes"], one.tokens).value,
        "counters": "equal" if one.counters_match else " ".join(f"{k}:{v}" for k, v in one.differing.items()),
    }


def write_budgets(results: Path, recipe: str, rows: list[Row], run: Path) -> list[Path]:
    """Writes `<results>/<recipe>/cache_budgets.*` and the figure; returns the files.

    Args:
        run: folder of one budget's records, for the provenance.
    """
    path, source = results / recipe / "cache_budgets.csv", run_source(run)
    atomic.write_text(path, to_csv(COLUMNS, rows))
    atomic.write_text(path.with_suffix(".md"), _markdown(recipe, rows, source))
    plot = Plot("cache_budgets", "Tokens/s by cache budget, experts on disk", COLUMNS, rows, _draw, 3.2, [source])
    return [path, path.with_suffix(".md"), *write_plot(results / recipe, plot)]


def _markdown(name: str, rows: Sequence[Row], source: str) -> str:
    header = ["policy", "budget", "method", "tokens/s", "simulated", "hits", "simulated", "MB/token", "counters"]
    shown = [
        [
            text(measured["policy"]),
            f"{measured['budget_percent']}%",
            text(measured["method"]),
            *(text(row["tokens_per_s"]) for row in (measured, simulated)),
            *(f"{row['hit_rate']:.1%}" if isinstance(row["hit_rate"], float) else "-" for row in (measured, simulated)),
            text(number(measured["bytes_per_token"]) / 1e6, 1),
            text(measured["counters"]),
        ]
        for measured, simulated in zip(rows[::2], rows[1::2], strict=True)
    ]
    return "\n\n".join([f"# Cache budgets, `{name}`", view_text(View("", header, shown)), NOTE, source]) + "\n"


def _draw(figure: Figure, rows: list[Row]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axes, method in zip(panels, methods, strict=True):
        for policy, look in LOOKS.items():
            for tag in ("measured", "simulated"):
                line = [r for r in rows if (r["method"], r["tag"]) == (method, tag) and r["policy"] in (policy, "none")]
                measured = tag == "measured"
                axes.plot(
                    [number(row["budget_percent"]) for row in line],
                    [number(row["tokens_per_s"]) for row in line],
                    color=look.color,
                    marker=look.marker,
                    linestyle=look.line if measured else "none",
                    markerfacecolor=look.color if measured else "white",
                    label=f"{policy} ({tag})",
                )
        axes.set_title(str(method))
        axes.set_xlabel("budget, % of the routed experts")
        axes.grid(axis="y")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("tokens/s")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
