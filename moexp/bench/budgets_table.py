"""The cache budgets' table and figure: what was measured, and the same recordings replayed by the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.base import atomic
from moexp.base.compute import prepare
from moexp.bench.budgets import DISK, Budget, all_budgets, measure_budgets
from moexp.bench.draftexpert import methods_of, run_platform
from moexp.bench.platforms import Platform
from moexp.bench.runner import make_jobs, select_prompts
from moexp.config.locations import draft_folder, run_folder
from moexp.config.run_folder import RunDir
from moexp.metrics import Ratio
from moexp.runtime.opening import sampling_of, traced_demands
from moexp.runtime.recording.files import ROUTING, read_recording
from moexp.runtime.store.policies import STATIC_HOT
from moexp.sim.fit import Fit
from moexp.sim.replay import Comparison, compare, replay
from moexp.sim.validate import RESIDENT, complete_steps, machine_of, resident_fit
from moexp.tables.core.plot import BLUE, GREEN, ORANGE, PURPLE, Look, Plot, write_plot
from moexp.tables.core.provenance import run_source
from moexp.tables.core.run import PROBE, read_json
from moexp.tables.core.table import Cell, Row, View, number, text, to_csv, view_text
from moexp.target.load import target_identity
from moexp.target.opening import open_draft_experts, open_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moexp.config.recipe import Recipe
    from moexp.target.experts import ExpertKey

FOLDER = "cache-budgets"
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


def run_budgets(recipe: Recipe, prompts: int, tokens: int, results: Path = Path("results")) -> list[Path]:
    """Measures what is missing, replays all of it, and writes `results/<recipe>/cache_budgets.*` and the figure.

    Args:
        prompts: decoded under every budget, of the bench's workloads in turn.
        tokens: new ones a prompt.

    Raises:
        MoexpError: an earlier stage is missing, or the trace that static-hot needs.
    """
    base_folder = run_folder(recipe, None, "draftexpert")
    folder = base_folder / FOLDER
    budgets = all_budgets()
    with RunDir(base_folder, recipe):
        threads = prepare(recipe.threads)
        target = open_target(recipe)
        experts = open_draft_experts(recipe, target)
        if not (base_folder / RESIDENT / ROUTING).exists():
            run_platform(recipe, Platform(RESIDENT, "measured", "resident"), target, experts, base_folder, threads)
        padded = open_target(recipe, padded=True)
        demands = traced_demands(target_identity(padded.folder))
        ar, *_, full = methods_of(recipe.decode, DISK, target.spec.top_k)
        measure_budgets(
            padded,
            experts,
            folder,
            budgets,
            jobs=make_jobs(select_prompts(recipe.bench.workloads, prompts)[:prompts], target.tokenizer),
            methods=[ar, full],
            sampling=sampling_of(recipe.decode, recipe.seed),
            max_new_tokens=tokens,
            base=recipe.store,
            draft_weights=draft_folder(recipe),
            threads=threads,
        )
    fit = resident_fit(base_folder / RESIDENT)
    probe = read_json(folder / PROBE) or {}
    rows = [row for budget in budgets for row in budget_rows(budget, folder / budget.name, fit, probe, demands)]
    path = results / recipe.name / "cache_budgets.csv"
    atomic.write_text(path, to_csv(COLUMNS, rows))
    source = run_source(folder / budgets[0].name)
    atomic.write_text(path.with_suffix(".md"), _markdown(recipe.name, rows, source))
    plot = Plot("cache_budgets", "Tokens/s by cache budget, experts on disk", COLUMNS, rows, _draw, 3.2, [source])
    return [path, path.with_suffix(".md"), *write_plot(results / recipe.name, plot)]


def budget_rows(
    budget: Budget, place: Path, fit: Fit, probe: dict[str, object], demands: Mapping[ExpertKey, float]
) -> list[Row]:
    """A measured and a simulated row of each method."""
    recording = read_recording(place)
    found = compare(complete_steps(place), replay(recording, machine_of(recording, fit, probe), demands))
    return [_row(budget, one, which) for one in found for which in (0, 1)]


def _row(budget: Budget, one: Comparison, which: int) -> Row:
    def count(name: str) -> int:
        return one.counts[name][which]

    seconds = (one.measured_s, one.simulated_s)[which]
    return {
        "policy": budget.policy,
        "budget_percent": budget.percent,
        "method": one.method,
        "tag": ("measured", "simulated")[which],
        "cycles": one.cycles,
        "tokens": one.tokens,
        "seconds": seconds,
        "tokens_per_s": Ratio(one.tokens, seconds).value,
        "demanded": count("demanded"),
        "hits": count("covered"),
        "missed": count("missed"),
        "hit_rate": Ratio(count("covered"), count("demanded")).value,
        "bytes_per_token": Ratio(count("read_bytes"), one.tokens).value,
        "counters": "equal" if one.counters_match else " ".join(f"{k}:{v}" for k, v in one.differing.items()),
    }


def _markdown(name: str, rows: Sequence[Row], source: str) -> str:
    header = ["policy", "budget", "method", "tokens/s", "simulated", "hits", "simulated", "MB/token", "counters"]
    shown = [
        [
            text(measured["policy"]),
            f"{measured['budget_percent']}%",
            text(measured["method"]),
            text(measured["tokens_per_s"]),
            text(simulated["tokens_per_s"]),
            _percent(measured["hit_rate"]),
            _percent(simulated["hit_rate"]),
            text(number(measured["bytes_per_token"]) / 1e6, 1),
            text(measured["counters"]),
        ]
        for measured, simulated in zip(rows[::2], rows[1::2], strict=True)
    ]
    parts = [
        f"# Cache budgets, `{name}`",
        view_text(View("", header, shown)),
        "Budget: part of the routed experts that may stay. tokens/s, hits and bytes are measured, those headed "
        "`simulated` are a replay of the recorded run. Every line's store begins empty and is filled by the prompt's "
        "prefill. Hits: demanded experts in memory or on their way. Counters: equal in every cycle, or the number of "
        "cycles in which each is not; with prefetch and a cache they depend on when transfers land.",
        source,
    ]
    return "\n\n".join(parts) + "\n"


def _draw(figure: Figure, rows: list[Row]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axes, method in zip(panels, methods, strict=True):
        for policy, look in LOOKS.items():
            for tag in ("measured", "simulated"):
                mine = [r for r in rows if (r["method"], r["tag"]) == (method, tag) and r["policy"] in (policy, "none")]
                measured = tag == "measured"
                axes.plot(
                    [number(row["budget_percent"]) for row in mine],
                    [number(row["tokens_per_s"]) for row in mine],
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


def _percent(value: Cell) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "-"
