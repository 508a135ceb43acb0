"""`moexp bench`: the runs behind DraftExpert's tables 2 to 6.

Tables 2, 3 and 4 read one interleaved run a platform, in which AR and every speculative method take turns on the same
store; table 3 also counts on a resident store, where many prompts are cheap and counts are the same; table 5 trains.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from moexp import atomic
from moexp.artifacts import (
    draft_folder,
    find_target,
    method_of,
    open_draft_experts,
    open_target,
    opened_store,
    sampling_of,
)
from moexp.bench.draftexpert_data import (
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
from moexp.bench.draftexpert_tables import TABLES
from moexp.bench.platforms import Platform, find_platform, probe, sample_bandwidth, store_section
from moexp.bench.runner import (
    Job,
    PromptEngine,
    begin_run,
    is_complete,
    make_jobs,
    run_methods,
    select_prompts,
    tuning_prompts,
)
from moexp.compute import prepare
from moexp.errors import MoexpError
from moexp.progress import stage
from moexp.provenance import collect_provenance
from moexp.recipe import Recipe
from moexp.report import PROBE, PROVENANCE, check_paper, read_json, run_folder, write_tables
from moexp.rundir import RunDir
from moexp.runtime.decode import Method
from moexp.schema import DecodeSection, StoreSection
from moexp.target.draft_expert import WEIGHTS, DraftExperts, read_header
from moexp.target.load import Target, target_identity

TIMED, COUNTED, TRAINED = (2, 3, 4), (3,), (5,)  # tables that need the platforms, the resident run, the ablation


def run_bench(
    recipe: Recipe,
    tables: Collection[int] = tuple(TABLES),
    *,
    paper: str = "draftexpert",
    out: Path | None = None,
    results: Path = Path("results"),
) -> list[Path]:
    """Measures what `tables` need and is not measured yet, then writes the tables.

    Args:
        recipe: names target, draft experts, decoding and platforms.
        tables: numbers, 2 to 6.
        paper: whose tables.
        out: folder of the raw records, in place of one under $MOEXP_HOME.
        results: tables go to `results/<recipe>/<paper>`.

    Returns:
        the files of the tables asked for.

    Raises:
        MoexpError: an unknown paper, table or platform, or an earlier stage is missing.
    """
    check_paper(paper)
    check_tables(tables)
    platforms = [find_platform(name) for name in recipe.bench.platforms]
    folder = run_folder(recipe, out)
    if set(tables) - {6}:
        with RunDir(folder, recipe):
            measure(recipe, tables, platforms, folder)
    return write_tables(recipe, paper, folder, results, tables)


def check_tables(tables: Collection[int]) -> None:
    """MoexpError unless these tables are measured here."""
    for number in tables:
        if number not in TABLES:
            raise MoexpError(
                f"no table {number} to measure", where="--table", valid=", ".join([*map(str, TABLES), "all"])
            )


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

        place = folder / ABLATION
        run_ablation(recipe, target, place, threads, lambda: keep_provenance(place, recipe.seed))


def describe(recipe: Recipe, target: Target, folder: Path) -> None:
    """Keeps what the tables need to know of the target and its draft experts."""
    spec, header = target.spec, read_header(draft_folder(recipe))
    kept = {
        "name": recipe.name,
        "fingerprint": target_identity(target.folder),
        "platforms": list(recipe.bench.platforms),
        "top_k": spec.top_k,
        "num_experts": spec.num_experts,
        "moe_layers": len(spec.moe_layers),
        "num_shared": spec.num_shared,
    }
    atomic.write_json(folder / TARGET, kept)
    metrics = {key: header.get(key) for key in ("metrics", "training", "width")}
    atomic.write_json(folder / DRAFT_METRICS, metrics)


def methods_of(decode: DecodeSection, platform: Platform, top_k: int) -> list[Method]:
    """What is run on a platform: AR, top-r and draft experts with the paper's K, and the recipe's tuned settings."""
    base = dataclasses.replace(method_of(decode), policy="confidence-expansion", prefetch=True, name="")
    fixed = Method(max_draft=DRAFT_TOKENS)
    top_r = [dataclasses.replace(fixed, drafter="top-r", r=r, name=name) for r, name in TOP_R.items() if r <= top_k]
    drafts = dataclasses.replace(fixed, drafter="draft-expert", name=FIXED)
    if platform.kind == "resident":
        return [*top_r, drafts]
    # Loading is slow where the ratio is large: there only what the tables cannot do without.
    slow = platform.ratio is not None and platform.ratio.value > 1
    full = dataclasses.replace(base, drafter="draft-expert", r=1, name=FULL)
    return [
        Method(name=AR),
        *(top_r[:1] if slow else top_r),
        *([] if platform.paced else [dataclasses.replace(full, drafter="top-r", name=TOP_1_FULL)]),
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
    warmup = make_jobs(tuning_prompts(max(1, bench.warmup_prompts)), target.tokenizer)
    tokens = min(bench.max_new_tokens, bench.paced_new_tokens) if platform.paced else bench.max_new_tokens
    methods = methods_of(recipe.decode, platform, target.spec.top_k)
    settings = {
        "tag": platform.tag,
        "target": target.fingerprint,
        "expert_width": target.spec.expert_width,
        "draft_experts": draft_identity(draft_folder(recipe)),
        "prompts": [job.id for job in jobs],
        "methods": [dataclasses.asdict(method) for method in methods],
        "max_new_tokens": tokens,
        "temperature": recipe.decode.temperature,
        "threads": threads,
        "ratio": platform.ratio.value if platform.ratio else None,
    }
    done = begin_run(place, settings)
    if is_complete(done, jobs, methods):
        return
    keep_provenance(place, recipe.seed)
    probed = kept_probe(platform, target, recipe.store, warmup, place)
    link = probed["bandwidth_bytes_s"][0] if platform.paced else None
    with opened_store(target, store_section(platform, recipe.store, link)) as store:
        engine = PromptEngine(target, store, draft_experts=experts)

        def sample() -> None:
            if platform.kind == "disk":
                probed["direct"] = bool(getattr(getattr(store, "source", None), "direct", False))
                seed = len(probed["bandwidth_bytes_s"])
                probed["bandwidth_bytes_s"].append(sample_bandwidth(target, probed, seed))
                atomic.write_json(place / PROBE, probed)

        run_methods(
            engine,
            jobs,
            methods,
            sampling_of(recipe.decode, recipe.seed),
            folder=place,
            done=done,
            max_new_tokens=tokens,
            stop_ids=target.stop_ids,
            title=f"Bench {platform.name}",
            warmup=warmup[: bench.warmup_prompts],
            after_prompt=sample,
        )
        del engine


def kept_probe(
    platform: Platform, target: Target, base: StoreSection, warmup: list[Job], place: Path
) -> dict[str, Any]:
    """The folder's probe, or a new one: a resumed run keeps the link that it began with."""
    found = read_json(place / PROBE)
    if found is None and platform.kind != "resident":
        with stage(f"Probe {platform.name}", None):
            found = probe(platform, target, base, warmup)
        atomic.write_json(place / PROBE, found)
    return found or {}


def keep_provenance(place: Path, seed: int) -> None:
    """Adds this invocation to those that had a part in the folder's records."""
    earlier = (read_json(place / PROVENANCE) or {}).get("invocations", [])
    atomic.write_json(place / PROVENANCE, {"invocations": [*earlier, collect_provenance(seed)]})


def draft_identity(folder: Path) -> str:
    """Which draft experts these are: a hash of their weights."""
    with open(folder / WEIGHTS, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
