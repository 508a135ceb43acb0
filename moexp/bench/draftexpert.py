"""`moexp bench`: the runs behind DraftExpert's tables 2 to 6.

Tables 2, 3 and 4 read one interleaved run a platform, in which AR and every speculative method take turns on the same
store; table 3 also counts on a resident store, where many prompts are cheap and counts are the same; table 5 trains.

Paper: DraftExpert Table 2; DraftExpert Table 3; DraftExpert Table 4; DraftExpert Table 5; DraftExpert Table 6.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Collection
from pathlib import Path

from moexp.base import atomic
from moexp.bench.ablation import run_ablation
from moexp.bench.measure import measure_on
from moexp.bench.platforms import Platform, find_platform
from moexp.bench.setup import Setup
from moexp.bench.turns import SLICE_S
from moexp.config.decode import DecodeSection
from moexp.config.locations import draft_folder
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import method_of
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
from moexp.target.draft_expert import read_header
from moexp.target.load import target_identity
from moexp.target.opening import find_target
from moexp.target.pack_format import weight_sizes

TIMED, COUNTED, TRAINED = {2, 3, 4}, {3}, {5}  # tables that need the platforms, the resident run, the ablation


def run_draftexpert(recipe: Recipe, tables: Collection[int], folder: Path) -> None:
    """Measures what the tables need and the run folder does not hold yet.

    Raises:
        MoexpError: an unknown platform, or an earlier stage is missing.
    """
    platforms = [find_platform(name) for name in recipe.bench.platforms]
    wanted = set(tables)
    if not wanted - {6}:
        return
    with RunDir(folder, recipe):
        setup = Setup.open(recipe)
        describe(setup, folder)
        if wanted & COUNTED:
            run_platform(setup, Platform(RESIDENT, "measured", "resident"), folder)
        for platform in platforms if wanted & TIMED else ():
            run_platform(setup.on(platform), platform, folder)
            gc.collect()
        if wanted & TRAINED:
            run_ablation(setup, folder / ABLATION)


def describe(setup: Setup, folder: Path) -> None:
    """Keeps what the tables need to know of the target and its draft experts."""
    recipe, target, spec = setup.recipe, setup.target, setup.target.spec
    folders = [target.folder]
    if any(find_platform(name).padded for name in recipe.bench.platforms):
        folders.append(find_target(recipe, padded=True))
    facts = {
        "name": recipe.name,
        "fingerprint": target_identity(target.folder),
        "platforms": list(recipe.bench.platforms),
        "top_k": spec.top_k,
        "num_experts": spec.num_experts,
        "moe_layers": len(spec.moe_layers),
        "num_shared": spec.num_shared,
        "weights": [weight_sizes(each) for each in dict.fromkeys(folders)],
    }
    atomic.write_json(folder / TARGET, facts)
    header = read_header(draft_folder(recipe))
    atomic.write_json(folder / DRAFT_METRICS, {key: header.get(key) for key in ("metrics", "training", "width")})


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


def run_platform(setup: Setup, platform: Platform, folder: Path) -> None:
    """All methods of a platform, interleaved over its prompts, into `<folder>/<platform>`."""
    bench = setup.recipe.bench
    prompts, tokens = bench.local_disk_prompts, bench.max_new_tokens
    if platform.kind == "resident":
        prompts = bench.resident_prompts
    elif platform.paced:
        prompts, tokens = bench.paced_prompts, min(tokens, bench.paced_new_tokens)
    plan = setup.plan(
        setup.jobs(min(prompts, bench.prompts_per_workload)),
        methods_of(setup.recipe.decode, platform, setup.target.spec.top_k),
        tokens,
        title=f"Bench {platform.name}",
        warmup=setup.tuning_jobs(bench.warmup_prompts),
        slice_s=SLICE_S,
    )
    minutes = bench.part_minutes and bench.part_minutes / (2 if platform.paced else 1)
    measure_on(setup, platform, plan, folder / platform.name, minutes=minutes)
