"""`moexp tune`: K, tau, B and the prefetched share of the full method, on prompts that no table uses.

The whole grid is first estimated from one recording (simulated). What looks best, and what the recipe has now, is then
measured on the recipe's platform by successive halving: each round decodes fresh prompts, interleaved and with AR among
them, and the better half goes on.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moexp import metrics
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.bench.engine import PromptEngine
from moexp.bench.jobs import Job
from moexp.bench.measure import measure_on
from moexp.bench.platforms import Platform, find_platform, probe, sample_bandwidth
from moexp.bench.replay import Setting, estimate, record_cycles
from moexp.bench.setup import Setup
from moexp.bench.turns import SLICE_S
from moexp.config.decode import StoreSection
from moexp.config.locations import artifact_path
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import method_of, opened_store
from moexp.runtime.verifiers.sampling import Sampling
from moexp.tables.core.run import ArmRecords, invocations, load_measured
from moexp.tables.tune import AR, Sweep, write_sweep

SHORTLIST = 6
ROUNDS = 3
LINK_SAMPLES = 5


@dataclass(frozen=True)
class Tuned:
    """What `moexp tune` chose: the setting, its measured speedup over AR, and the file with the whole sweep."""

    setting: Setting
    speedup: float | None
    table: Path

    def overrides(self) -> list[str]:
        """The choice as `--set` would have it."""
        one = self.setting
        words = [f"decode.max_draft={one.max_draft}", f"decode.tau={one.tau:g}", f"decode.budget={one.budget}"]
        return words if one.prefetch_top is None else [*words, f"decode.prefetch_top={one.prefetch_top}"]


def run_tune(recipe: Recipe, *, out: Path | None = None, results: Path = Path("results")) -> Tuned:
    """Chooses K, tau, B and how much is prefetched; writes `results/<recipe>/tune.csv` and `.md`.

    Args:
        recipe: its tune section holds the grid.
        out: folder of the raw records, in place of one under $MOEXP_HOME.

    Raises:
        MoexpError: an earlier stage is missing, or the recipe names no platform.
    """
    if not recipe.bench.platforms:
        raise MoexpError("no platform to tune on", where="bench.platforms", valid="at least one")
    platform = find_platform(recipe.bench.platforms[0])
    folder = out or artifact_path("tune", recipe, "target", "draft", "store", "tune", "decode", "bench", "seed")
    setup = Setup.open(recipe)
    jobs = setup.tuning_jobs(recipe.tune.prompts)
    with RunDir(folder, recipe) as run:
        on_platform = setup.on(platform)
        digest = f"{setup.target.fingerprint}:{setup.draft_hash}"
        estimated = run.result("estimates", digest)
        if estimated is None:
            probed = probe_link(on_platform, platform, jobs[0])
            values = estimates(setup, jobs, probed)
            estimated = {"probe": probed, "tokens_per_s": {setting.name: value for setting, value in values.items()}}
            run.mark_done("estimates", digest, estimated)
        guesses = {setting: estimated["tokens_per_s"][setting.name] for setting in grid(recipe)}
        arms = halving(on_platform, platform, jobs, shortlist(recipe, guesses), folder, estimated["probe"])
    settings = {setting.name: setting for setting in (*guesses, *own_setting(recipe))}
    finalists = [name for name in arms if name != AR and len(arms[name]) == len(arms[AR])]
    best = max(finalists, key=lambda name: _rate(arms[name]))
    table = results / recipe.name / "tune.csv"
    sweep = Sweep(
        {"target": recipe.name, "platform": platform.name}, platform.tag, guesses, settings, arms, best,
        recipe.bench.bootstrap_samples,
        [run for part in sorted(folder.glob("round-*")) for run in invocations(part)],
    )  # fmt: skip
    speedup = next(row["speedup"] for row in write_sweep(table, sweep) if row["chosen"])
    return Tuned(settings[best], speedup if isinstance(speedup, float) else None, table)


def grid(recipe: Recipe) -> list[Setting]:
    """Every combination that the tune section names."""
    section = recipe.tune
    values = itertools.product(section.max_draft, section.tau, section.budget, section.prefetch_top)
    return [Setting(*each) for each in values]


def probe_link(setup: Setup, platform: Platform, job: Job) -> dict[str, Any]:
    """The platform's probe, with a few samples of its bandwidth."""
    with stage(f"Probe {platform.name}", None):
        probed = probe(platform, setup.target, setup.recipe.store, job, compute=False)
        if platform.kind == "disk":
            samples = [sample_bandwidth(setup.target, probed, seed) for seed in range(LINK_SAMPLES)]
            probed["bandwidth_bytes_s"] = samples
    return probed


def estimates(setup: Setup, jobs: Sequence[Job], probed: dict[str, Any]) -> dict[Setting, float]:
    """Simulated tokens a second of every setting of the grid, from one recording on a resident store.

    Args:
        probed: of the platform; its link and the size of its experts count.
    """
    section, target = setup.recipe.tune, setup.target
    with stage("Record drafts", None), opened_store(target, StoreSection(kind="resident")) as store:
        engine = PromptEngine(target, store, draft_experts=setup.experts)
        longest = Method(drafter="draft-expert", max_draft=max(section.max_draft))
        cycles, costs = record_cycles(
            engine, jobs, longest, max_new_tokens=section.max_new_tokens, stop_ids=target.stop_ids
        )
    link = probed.get("bandwidth_bytes_s")
    load_s = probed["expert_bytes"] / statistics.median(link) if link else 0.0
    costs = dataclasses.replace(costs, load_s=load_s)
    return {setting: estimate(cycles, setting, costs) for setting in grid(setup.recipe)}


def shortlist(recipe: Recipe, guesses: dict[Setting, float]) -> list[Setting]:
    """The settings that look best, and the recipe's own. Of those with the same estimate (they did the same throughout
    the recording) only the first.
    """
    best: dict[float, Setting] = {}
    for setting in sorted(guesses, key=lambda one: -guesses[one]):
        best.setdefault(guesses[setting], setting)
    chosen = list(best.values())[:SHORTLIST]
    return list(dict.fromkeys([*chosen, *own_setting(recipe)]))


def own_setting(recipe: Recipe) -> list[Setting]:
    """What the recipe decodes with now; nothing where its B is not a number."""
    decode = recipe.decode
    if decode.budget == "cache":
        return []
    return [Setting(decode.max_draft, decode.tau, decode.budget, decode.prefetch_top)]


def halving(
    setup: Setup, platform: Platform, jobs: Sequence[Job], settings: list[Setting], folder: Path, probed: dict[str, Any]
) -> dict[str, list[ArmRecords]]:
    """Measures the settings, the better half of them on more prompts. Returns what each method did, AR included."""
    base = dataclasses.replace(method_of(setup.recipe.decode), drafter="draft-expert", r=1, prefetch=True)
    base = dataclasses.replace(base, policy="confidence-expansion")
    arms: dict[str, list[ArmRecords]] = {}
    rounds = split(jobs, ROUNDS)
    for number, fresh in enumerate(rounds, 1):
        methods = [dataclasses.replace(base, name=setting.name, **dataclasses.asdict(setting)) for setting in settings]
        plan = setup.plan(
            fresh,
            [Method(name=AR), *methods],
            setup.recipe.tune.max_new_tokens,
            sampling=Sampling(seed=setup.recipe.seed),
            title=f"Tune, round {number} of {len(rounds)}",
            warmup=jobs[-1:] if number == 1 else (),
            slice_s=SLICE_S,
        )
        part = folder / f"round-{number}"
        measure_on(setup, platform, plan, part, probed=probed)
        measured = load_measured(part)
        assert measured is not None
        for method, by_request in measured.arms.items():
            arms.setdefault(method, []).extend(by_request.values())
        ranked = sorted(settings, key=lambda one: -_rate(arms[one.name]))
        settings = ranked[: max(2, (len(ranked) + 1) // 2)]
    return arms


def split(jobs: Sequence[Job], parts: int) -> list[Sequence[Job]]:
    """Up to `parts` consecutive pieces of about equal length, none of them empty, the first the longest."""
    parts = min(parts, len(jobs))
    sizes = [len(jobs) // parts + (n < len(jobs) % parts) for n in range(parts)]
    ends = list(itertools.accumulate(sizes))
    return [jobs[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _rate(arms: Sequence[ArmRecords]) -> float:
    return metrics.tokens_per_s([arm.request for arm in arms]).value or 0.0
