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
from moexp.base import atomic
from moexp.base.compute import prepare
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.bench.measure import measure_on, weights_hash
from moexp.bench.platforms import Platform, find_platform, probe, sample_bandwidth
from moexp.bench.replay import Setting, estimate, record_cycles
from moexp.bench.runner import Job, PromptEngine, make_jobs, tuning_prompts
from moexp.config.decode import StoreSection
from moexp.config.locations import artifact_path, draft_folder
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.metrics import Ratio
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import method_of, opened_store
from moexp.runtime.verifiers.sampling import Sampling
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.run import ArmRecords, invocations, load_measured
from moexp.tables.core.table import Row, View, set_interval, text, text_of, to_csv, view_text
from moexp.tables.core.tags import MEASURED, SIMULATED
from moexp.target.draft_expert import DraftExperts
from moexp.target.load import Target
from moexp.target.opening import find_target, open_draft_experts, open_target

SHORTLIST = 6
ROUNDS = 3
LINK_SAMPLES = 5
COLUMNS = ["target", "platform", "method", "max_draft", "tau", "budget", "prefetch_top", "tag", "prompts"]
COLUMNS += [f"{name}{end}" for name in ("tokens_per_s", "speedup", "alpha") for end in ("", "_lo", "_hi")] + ["chosen"]


@dataclass(frozen=True)
class Tuned:
    """What `moexp tune` found: the setting, its measured speedup over AR, and the file with the whole sweep."""

    setting: Setting
    speedup: float | None
    table: Path

    def overrides(self) -> list[str]:
        """The choice as `--set` would have it."""
        chosen = self.setting
        made = [f"decode.max_draft={chosen.max_draft}", f"decode.tau={chosen.tau:g}", f"decode.budget={chosen.budget}"]
        return made if chosen.prefetch_top is None else [*made, f"decode.prefetch_top={chosen.prefetch_top}"]


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
    threads = prepare(recipe.threads)
    target = open_target(recipe)
    experts = open_draft_experts(recipe, target)
    jobs = make_jobs(tuning_prompts(recipe.tune.prompts), target.tokenizer)
    with RunDir(folder, recipe) as run:
        slow = target
        if platform.padded and find_target(recipe, padded=True) != target.folder:
            slow = open_target(recipe, padded=True)
        digest = f"{target.fingerprint}:{weights_hash(draft_folder(recipe))}"
        kept = run.result("estimates", digest)
        if kept is None:
            probed = probe_link(recipe, platform, slow, jobs[0])
            found = estimates(recipe, target, experts, jobs, probed)
            kept = {"probe": probed, "tokens_per_s": {setting.name: value for setting, value in found.items()}}
            run.mark_done("estimates", digest, kept)
        guesses = {setting: kept["tokens_per_s"][setting.name] for setting in grid(recipe)}
        chosen = shortlist(recipe, guesses)
        arms = halving(recipe, platform, slow, experts, jobs, chosen, folder, kept["probe"], threads)
        runs = [run for place in sorted(folder.glob("round-*")) for run in invocations(place)]
    return write(recipe, platform, guesses, arms, results, runs)


def grid(recipe: Recipe) -> list[Setting]:
    """Every combination that the tune section names."""
    section = recipe.tune
    values = itertools.product(section.max_draft, section.tau, section.budget, section.prefetch_top)
    return [Setting(*each) for each in values]


def probe_link(recipe: Recipe, platform: Platform, target: Target, job: Job) -> dict[str, Any]:
    """The platform's probe, with a few samples of its bandwidth."""
    with stage(f"Probe {platform.name}", None):
        probed = probe(platform, target, recipe.store, job, compute=False)
        if platform.kind == "disk":
            probed["bandwidth_bytes_s"] = [sample_bandwidth(target, probed, seed) for seed in range(LINK_SAMPLES)]
    return probed


def estimates(
    recipe: Recipe, target: Target, experts: DraftExperts, jobs: Sequence[Job], probed: dict[str, Any]
) -> dict[Setting, float]:
    """Simulated tokens a second of every setting of the grid, from one recording on a resident store.

    Args:
        probed: of the platform; its link and the size of its experts count.
    """
    with stage("Record drafts", None), opened_store(target, StoreSection(kind="resident")) as store:
        engine = PromptEngine(target, store, draft_experts=experts)
        longest = Method(drafter="draft-expert", max_draft=max(recipe.tune.max_draft))
        cycles, costs = record_cycles(
            engine, jobs, longest, max_new_tokens=recipe.tune.max_new_tokens, stop_ids=target.stop_ids
        )
    link = probed.get("bandwidth_bytes_s")
    load_s = probed["expert_bytes"] / statistics.median(link) if link else 0.0
    return {setting: estimate(cycles, setting, dataclasses.replace(costs, load_s=load_s)) for setting in grid(recipe)}


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
    recipe: Recipe,
    platform: Platform,
    target: Target,
    experts: DraftExperts,
    jobs: Sequence[Job],
    settings: list[Setting],
    folder: Path,
    probed: dict[str, Any],
    threads: int,
) -> dict[str, list[ArmRecords]]:
    """Measures the settings, the better half of them on more prompts. Returns what each method did, AR included."""
    base = dataclasses.replace(method_of(recipe.decode), drafter="draft-expert", r=1, prefetch=True)
    arms: dict[str, list[ArmRecords]] = {}
    rounds = split(jobs, ROUNDS)
    for number, mine in enumerate(rounds, 1):
        methods = [Method(name="ar")] + [
            dataclasses.replace(
                base, policy="confidence-expansion", name=one.name,
                max_draft=one.max_draft, tau=one.tau, budget=one.budget, prefetch_top=one.prefetch_top,
            )
            for one in settings
        ]  # fmt: skip
        place = folder / f"round-{number}"
        measure_on(
            platform,
            target,
            experts,
            place,
            jobs=mine,
            methods=methods,
            sampling=Sampling(seed=recipe.seed),
            max_new_tokens=recipe.tune.max_new_tokens,
            warmup=jobs[-1:] if number == 1 else (),
            base=recipe.store,
            draft_weights=draft_folder(recipe),
            threads=threads,
            title=f"Tune, round {number} of {len(rounds)}",
            probed=probed,
        )
        measured = load_measured(place)
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


def write(
    recipe: Recipe,
    platform: Platform,
    guesses: dict[Setting, float],
    arms: dict[str, list[ArmRecords]],
    results: Path,
    runs: list[dict[str, Any]],
) -> Tuned:
    """The sweep as CSV, measured rows first, best first, and what was measured of it as Markdown; the choice is the
    best of those that saw every prompt.
    """
    by_name = {setting.name: setting for setting in (*guesses, *own_setting(recipe))}
    most = len(arms["ar"])
    finalists = [name for name in arms if name != "ar" and len(arms[name]) == most]
    best = max(finalists, key=lambda name: _rate(arms[name]))
    rows = [_row(recipe, platform, by_name.get(name), arms[name], arms["ar"], name == best) for name in arms]
    rows.sort(key=lambda row: (row["method"] != "ar", -int(row["prompts"] or 0), -float(row["tokens_per_s"] or 0)))
    speedup = next(row["speedup"] for row in rows if row["chosen"])
    measured = list(rows)
    for setting in sorted(guesses, key=lambda one: -guesses[one]):
        rows.append(_keys(recipe, platform, setting, SIMULATED) | {"tokens_per_s": guesses[setting]})
    path = results / recipe.name / "tune.csv"
    atomic.write_text(path, to_csv(COLUMNS, rows))
    atomic.write_text(path.with_suffix(".md"), _markdown(recipe, platform, measured, len(guesses), runs))
    return Tuned(by_name[best], speedup if isinstance(speedup, float) else None, path)


def _markdown(recipe: Recipe, platform: Platform, rows: list[Row], settings: int, runs: list[dict[str, Any]]) -> str:
    names = ["method", "max_draft", "tau", "budget", "prefetch_top", "prompts"]
    shown = [
        [
            *(text(row.get(name)) for name in names),
            *(text_of(row, name) for name in ("tokens_per_s", "speedup", "alpha")),
            "chosen" if row["chosen"] else "",
        ]
        for row in rows
    ]
    header = ["method", "K", "tau", "B", "top", "prompts", "tokens/s", "speedup", "alpha", ""]
    parts = [
        f"# Tuning of `{recipe.name}`",
        view_text(View(f"{platform.name} ({rows[0]['tag']})", header, shown)),
        f"The best of {settings} settings by a simulation from recorded drafts (`tune.csv` has it in full), measured "
        "on prompts of their own by successive halving; `chosen` is the fastest of those that saw every prompt.",
        f"Provenance: {provenance_text(runs)}.",
    ]
    return "\n\n".join(parts) + "\n"


def _row(
    recipe: Recipe,
    platform: Platform,
    setting: Setting | None,
    arms: list[ArmRecords],
    ar: list[ArmRecords],
    chosen: bool,
) -> Row:
    samples = recipe.bench.bootstrap_samples
    base = {arm.request.request: arm for arm in ar}

    def rate(arm: ArmRecords) -> Ratio:
        return metrics.tokens_per_s([arm.request])

    row = _keys(recipe, platform, setting, MEASURED if platform.tag == "measured" else platform.tag)
    row["prompts"] = len(arms)
    row["chosen"] = "yes" if chosen else None
    set_interval(row, "tokens_per_s", metrics.bootstrap([rate(arm) for arm in arms], samples=samples))
    pairs = [(rate(arm), rate(base[arm.request.request])) for arm in arms]
    set_interval(row, "speedup", metrics.bootstrap_quotient(pairs, samples=samples) if setting else None)
    set_interval(row, "alpha", metrics.bootstrap([metrics.alpha(arm.steps) for arm in arms], samples=samples))
    return row


def _keys(recipe: Recipe, platform: Platform, setting: Setting | None, tag: str) -> Row:
    values: dict[str, Any] = {} if setting is None else dataclasses.asdict(setting)
    return {
        "target": recipe.name,
        "platform": platform.name,
        "method": "ar" if setting is None else "draft-expert",
        **values,
        "tag": tag,
    }


def _rate(arms: list[ArmRecords]) -> float:
    return metrics.tokens_per_s([arm.request for arm in arms]).value or 0.0
