"""`moexp bench`: the runs behind DraftExpert's tables 2 to 6.

Tables 2, 3 and 4 read one interleaved run a platform, in which AR and every speculative method take turns on the same
store; table 3 also counts on a resident store, where many prompts are cheap and counts are the same; table 5 trains.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Collection
from pathlib import Path

from moexp.base import atomic
from moexp.base.compute import prepare
from moexp.bench.measure import measure_on
from moexp.bench.platforms import Platform, find_platform
from moexp.bench.runner import make_jobs, select_prompts, tuning_prompts
from moexp.config.decode import DecodeSection
from moexp.config.locations import draft_folder
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import method_of, sampling_of
from moexp.tables.draftexpert.labels import (
    ABLATION,
    AR,
    DRAFT_METRICS,
    DRAFT_TOKENS,
    FIXED,
    FULL,
    RESIDENT,
    TARGET,
    TOP_1_FULL,
    TOP_R,
    TRUNCATED,
)
from moexp.target.draft_expert import DraftExperts, read_header
from moexp.target.load import Target, target_identity
from moexp.target.opening import find_target, open_draft_experts, open_target
from moexp.target.weights import weight_sizes

TIMED, COUNTED, TRAINED = (2, 3, 4), (3,), (5,)  # tables that need the platforms, the resident run, the ablation


def run_draftexpert(recipe: Recipe, tables: Collection[int], folder: Path) -> None:
    """Measures what the tables need and the run folder does not hold yet.

    Raises:
        MoexpError: an unknown platform, or an earlier stage is missing.
    """
    platforms = [find_platform(name) for name in recipe.bench.platforms]
    if set(tables) - {6}:
        with RunDir(folder, recipe):
            measure(recipe, tables, platforms, folder)


def measure(recipe: Recipe, tables: Collection[int], platforms: list[Platform], folder: Path) -> None:
    """Runs what the tables need and the folder does not hold yet."""
    threads = prepare(recipe.threads)
    target = open_target(recipe)
    experts = open_draft_experts(recipe, target)
    describe(recipe, target, folder)
    if set(tables) & {*TIMED, *COUNTED}:
        if set(tables) & set(COUNTED):
            run_platform(recipe, Platform(RESIDENT, "measured", "resident"), target, experts, folder, threads)
        for platform in platforms:
            run_on(recipe, platform, target, experts, folder, threads)
    if set(tables) & set(TRAINED):
        from moexp.bench.ablation import run_ablation

        run_ablation(recipe, target, folder / ABLATION, threads)


def describe(recipe: Recipe, target: Target, folder: Path) -> None:
    """Keeps what the tables need to know of the target and its draft experts."""
    spec, header = target.spec, read_header(draft_folder(recipe))
    folders = [target.folder]
    if any(find_platform(name).padded for name in recipe.bench.platforms):
        folders.append(find_target(recipe, padded=True))
    kept = {
        "name": recipe.name,
        "fingerprint": target_identity(target.folder),
        "platforms": list(recipe.bench.platforms),
        "top_k": spec.top_k,
        "num_experts": spec.num_experts,
        "moe_layers": len(spec.moe_layers),
        "num_shared": spec.num_shared,
        "weights": [weight_sizes(place) for place in dict.fromkeys(folders)],
    }
    atomic.write_json(folder / TARGET, kept)
    metrics = {key: header.get(key) for key in ("metrics", "training", "width")}
    atomic.write_json(folder / DRAFT_METRICS, metrics)


def methods_of(decode: DecodeSection, platform: Platform, top_k: int) -> list[Method]:
    """What is run on a platform: AR, top-r and draft experts with the paper's K, and the recipe's tuned settings."""
    base = dataclasses.replace(method_of(decode), policy="confidence-expansion", prefetch=True, tree=None, name="")
    fixed = Method(max_draft=DRAFT_TOKENS)
    top_r = [dataclasses.replace(fixed, drafter="top-r", r=r, name=name) for r, name in TOP_R.items() if r <= top_k]
    drafts = dataclasses.replace(fixed, drafter="draft-expert", name=FIXED)
    if platform.kind == "resident":
        return [*top_r, drafts]
    # Where loading takes many times as long as computing, only what the tables cannot do without.
    slow = platform.ratio is not None and platform.ratio.value > 1
    full = dataclasses.replace(base, drafter="draft-expert", r=1, name=FULL)
    return [
        Method(name=AR),
        *(top_r[:1] if slow else top_r),
        *([] if slow else [dataclasses.replace(full, drafter="top-r", name=TOP_1_FULL)]),
        drafts,
        dataclasses.replace(full, prefetch=False, name=TRUNCATED),
        full,
    ]


def run_on(
    recipe: Recipe, platform: Platform, target: Target, experts: DraftExperts, folder: Path, threads: int
) -> None:
    """`run_platform` on the padded copy of the target where the platform asks for it."""
    if platform.padded and find_target(recipe, padded=True) != target.folder:
        target = open_target(recipe, padded=True)
    run_platform(recipe, platform, target, experts, folder, threads)
    gc.collect()


def run_platform(
    recipe: Recipe, platform: Platform, target: Target, experts: DraftExperts, folder: Path, threads: int
) -> None:
    """All methods of a platform, interleaved over its prompts, into `<folder>/<platform>`."""
    bench, place = recipe.bench, folder / platform.name
    most = {"resident": bench.resident_prompts}.get(
        platform.kind, bench.paced_prompts if platform.paced else bench.local_disk_prompts
    )
    jobs = make_jobs(select_prompts(bench.workloads, min(most, bench.prompts_per_workload)), target.tokenizer)
    warmup = make_jobs(tuning_prompts(bench.warmup_prompts), target.tokenizer)
    tokens = min(bench.max_new_tokens, bench.paced_new_tokens) if platform.paced else bench.max_new_tokens
    measure_on(
        platform,
        target,
        experts,
        place,
        jobs=jobs,
        methods=methods_of(recipe.decode, platform, target.spec.top_k),
        sampling=sampling_of(recipe.decode, recipe.seed),
        max_new_tokens=tokens,
        warmup=warmup,
        base=recipe.store,
        draft_weights=draft_folder(recipe),
        threads=threads,
        minutes=bench.part_minutes and bench.part_minutes / (2 if platform.paced else 1),
    )
