"""Where the artifacts of a recipe lie: stages meet only through these folders, and use what exists as it is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.config.recipe import Recipe

RUN_SECTIONS = {
    "draftexpert": ("target", "draft", "decode", "store", "bench", "seed"),
    "ecospec": ("target", "draft", "head", "predictor", "ecospec", "store", "bench", "seed"),
}
"""What a paper's run folder depends on."""


def run_folder(recipe: Recipe, out: Path | None = None, paper: str = "draftexpert") -> Path:
    """Where `moexp bench` keeps the recipe's raw records for a paper's tables."""
    sections = RUN_SECTIONS[paper] + (("paths.head",) if paper == "ecospec" and recipe.paths.head else ())
    return artifact_path("runs", recipe, *sections) if out is None else out


def target_folder(recipe: Recipe) -> Path:
    """Where the recipe's built target lies (unpadded), whether it exists yet or not."""
    return artifact_path("targets", recipe, "target", "seed", given=recipe.paths.target)


def padded_folder(recipe: Recipe) -> Path:
    """Where the target to decode from lies: the padded copy where the recipe asks for one."""
    folder, width = target_folder(recipe), recipe.target.pad_expert_width
    return folder if width is None else padded_beside(folder, width)


def padded_beside(folder: Path, width: int) -> Path:
    """Where the copy of the target in `folder` lies whose experts are padded to `width`."""
    return folder.with_name(f"{folder.name}-pad{width}")


def draft_folder(recipe: Recipe) -> Path:
    """Where the recipe's draft experts lie."""
    return artifact_path("drafts", recipe, "target", "draft", "seed", given=recipe.paths.draft_experts)


def predictor_recipe(recipe: Recipe) -> Recipe:
    """The recipe with the trace that its expert predictor learns from."""
    trace = recipe.trace.model_copy(update={"tokens": recipe.predictor.trace_tokens, "gates": False})
    return recipe.model_copy(update={"trace": trace})


def predictor_folder(recipe: Recipe) -> Path:
    """Where the recipe's expert predictor lies, with checkpoints in folders within."""
    sections = ("target", "predictor", "trace", "draft.corpus", "seed")
    return artifact_path("predictors", predictor_recipe(recipe), *sections, given=recipe.paths.predictor)


def with_head(recipe: Recipe, kind: str) -> Recipe:
    """The recipe with its head of this kind and otherwise the same settings."""
    return recipe.model_copy(update={"head": recipe.head.model_copy(update={"kind": kind})})


def head_folder(recipe: Recipe) -> Path:
    """Where the recipe's draft head lies that is trained here."""
    folder = artifact_path("heads", recipe, "target", "head", "draft.corpus", "draft.held_out_rows", "seed")
    return folder.with_name(f"{recipe.head.kind}-{folder.name}")


def source_cache() -> Path:
    """Fetched files that targets are built from."""
    return home() / "sources"


def require(exists: bool, missing: str, folder: Path, command: str) -> None:
    """MoexpError that names the command to run, unless an artifact exists."""
    if not exists:
        raise MoexpError(missing, where=str(folder), valid=f"run: {command}")


RESULTS = Path("results")


def results_folder(recipe: Recipe) -> Path:
    """Where a recipe's results go: `results/<recipe>` of the working directory, beside the tables."""
    return RESULTS / recipe.name


def trace_folder(recipe: Recipe, text: str | None = None) -> Path:
    """Where the recipe's routing trace lies, over its corpus or over `text`."""
    folder = artifact_path("traces", recipe, "target", "trace", "draft.corpus", "seed")
    if text is None:
        return folder
    return folder.with_name(f"{folder.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def draft_work(recipe: Recipe) -> Path:
    """Where training of the draft experts keeps its corpora and checkpoints."""
    folder = draft_folder(recipe)
    return folder.with_name(folder.name + ".work")


def home() -> Path:
    """Where artifacts live: $MOEXP_HOME, or ~/.cache/moexp."""
    return Path(os.environ.get("MOEXP_HOME") or "~/.cache/moexp").expanduser()


def artifact_path(kind: str, recipe: Recipe, *sections: str, given: str | None = None) -> Path:
    """The folder `given`, or one under `home()` that the recipe's `sections` decide: `targets/carved-0f3a...`."""
    if given is not None:
        return Path(given)
    target = recipe.target
    label = Path(target.path).name if target.kind == "hub" and target.path else target.kind
    return home() / kind / f"{label}-{recipe.digest(*sections)}"
