"""`moexp race`: the decoding methods of several recipes on the same prompts, in turns, over one store.

Each recipe brings its `decode` section and whatever that needs (draft experts, a draft head, an expert predictor); all
must be of the same target. AR always runs along.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.bench.engine import PromptEngine
from moexp.bench.measure import measure_on
from moexp.bench.platforms import IN_MEMORY, Platform, find_platform
from moexp.bench.setup import Setup
from moexp.bench.turns import SLICE_S
from moexp.config.locations import artifact_path, draft_folder, predictor_folder
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.runtime.decoding.method import HEAD, LEARNED, Method
from moexp.runtime.opening import method_of, predictors_of, sampling_of
from moexp.runtime.store.store import ExpertStore
from moexp.tables.core.run import load_measured
from moexp.tables.race import AR, race_rows, write_race
from moexp.target.load import Target
from moexp.target.opening import find_head, find_target, head_fingerprint, open_draft_experts, open_draft_head

FOLDER = "races"


def run_race(
    recipes: Sequence[Recipe],
    *,
    platform: str | None = None,
    prompts: int = 1,
    tokens: int = 32,
    name: str = "race",
    results: Path = Path("results"),
) -> list[Path]:
    """Decodes the prompts by AR and by each recipe's method, and compares them.

    Args:
        recipes: the first one's target, workloads and store are raced on; methods are called by their recipe's name.
        platform: of `moexp.bench.platforms`, or `resident`; by default the first recipe's first.
        prompts: a workload.
        tokens: new ones a prompt.
        name: of the files `results/<first recipe>/races/<name>.*`.

    Returns:
        the files.

    Raises:
        MoexpError: recipes of one name, of different targets or with different sampling, an unknown platform, or a
            stage before is missing.
    """
    base = recipes[0]
    check_recipes(recipes)
    on = race_platform(platform, base)
    setup = Setup.open(base, padded=on.padded, drafts=False)
    methods = [Method(name=AR), *(dataclasses.replace(method_of(one.decode), name=one.name) for one in recipes)]
    folder = artifact_path("races", base, "target", "store", "seed") / digest_of(recipes) / on.name
    plan = setup.plan(
        setup.jobs(prompts),
        methods,
        tokens,
        title=f"Race on {on.name}",
        warmup=setup.tuning_jobs(base.bench.warmup_prompts),
        slice_s=SLICE_S,
    )
    with RunDir(folder, base):
        measure_on(setup, on, plan, folder, engines=lambda store: engines(recipes, setup.target, store))
    measured = load_measured(folder)
    assert measured is not None
    rows = race_rows(base.name, measured, methods, setup.target.spec.top_k, base.bench.bootstrap_samples)
    return write_race(results / base.name / FOLDER, name, measured, rows)


def check_recipes(recipes: Sequence[Recipe]) -> None:
    """Whether these can race.

    Raises:
        MoexpError: two of one name, one called `ar`, different targets, or different sampling.
    """
    base = recipes[0]
    names = [one.name for one in recipes]
    for number, one in enumerate(recipes):
        if one.name in (AR, *names[:number]):
            raise MoexpError(f"two methods called {one.name}", where="moexp race", valid="recipes of different names")
        if find_target(one) != find_target(base):
            where = f"{one.name}: {find_target(one)}"
            raise MoexpError("another target than the first recipe's", where=where, valid=str(find_target(base)))
        if sampling_of(one.decode, 0) != sampling_of(base.decode, 0):
            wanted = sampling_of(base.decode, 0)
            raise MoexpError("another sampling than the first recipe's", where=one.name, valid=str(wanted))


def race_platform(name: str | None, base: Recipe) -> Platform:
    """The platform to race on.

    Raises:
        MoexpError: an unknown one, or none is named.
    """
    if name == IN_MEMORY.name:
        return IN_MEMORY
    if name is None and not base.bench.platforms:
        raise MoexpError("no platform to race on", where="bench.platforms", valid="at least one, or --platform")
    return find_platform(name or base.bench.platforms[0])


def parts_of(recipe: Recipe) -> dict[str, Path]:
    """Folders of what the recipe's method was trained for, by kind."""
    method = method_of(recipe.decode)
    parts = {}
    if method.drafter == "draft-expert":
        parts["draft experts"] = draft_folder(recipe)
    if method.drafter == HEAD:
        parts["head"] = find_head(recipe)
    if method.tree is not None and method.tree.predictor == LEARNED:
        parts["predictor"] = predictor_folder(recipe)
    return parts


def digest_of(recipes: Sequence[Recipe]) -> str:
    """Names a race's folder: its methods, and the very weights that they were trained to."""
    digest = hashlib.sha256()
    for recipe in recipes:
        digest.update(repr(method_of(recipe.decode)).encode())
        for kind, folder in parts_of(recipe).items():
            if kind == "head" and recipe.paths.head is not None:  # as large as the target, where it lies in its folder
                digest.update(f"{recipe.name} {kind} {head_fingerprint(recipe)}".encode())
                continue
            for file in sorted(folder.glob("*.safetensors")):
                with open(file, "rb") as stream:
                    digest.update(f"{recipe.name} {kind} {file.name} ".encode())
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]


def engines(recipes: Sequence[Recipe], target: Target, store: ExpertStore) -> Callable[[Method], PromptEngine]:
    """One engine for each set of trained parts, and one without any for AR and the like; all over `store`."""
    by_parts: dict[tuple[Path, ...], PromptEngine] = {(): PromptEngine(target, store)}
    by_method = {AR: by_parts[()]}
    for recipe in recipes:
        parts, method = parts_of(recipe), method_of(recipe.decode)
        key = tuple(parts.values())
        if key not in by_parts:
            by_parts[key] = PromptEngine(
                target,
                store,
                draft_experts=open_draft_experts(recipe, target) if "draft experts" in parts else None,
                draft_head=open_draft_head(recipe, target) if "head" in parts else None,
                predictors=predictors_of(recipe, target, method),
            )
        by_method[recipe.name] = by_parts[key]
    return lambda method: by_method[method.label]
