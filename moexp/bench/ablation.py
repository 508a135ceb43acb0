"""Table 5: what each term of the training objective adds, from short trainings that differ in nothing else.

All rows share the residual warm-up (stage one), then take `bench.ablation_steps` end-to-end steps with the losses of
their row. Their checkpoints are artifacts: a row that is trained is not trained again.

Paper: DraftExpert Table 5.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moexp.base.progress import stage
from moexp.base.provenance import collect_provenance
from moexp.bench.engine import PromptEngine
from moexp.bench.folder import add_provenance, begin_run
from moexp.bench.runner import run_methods
from moexp.bench.setup import Setup
from moexp.config.decode import StoreSection
from moexp.config.learn import DraftSection
from moexp.config.locations import artifact_path, draft_folder
from moexp.config.recipe import Recipe
from moexp.learn.core.loop import Run, followed
from moexp.learn.draft_expert.distill import distill
from moexp.learn.draft_expert.path import DraftPath
from moexp.learn.draft_expert.train import fit, measure, settings_of
from moexp.learn.setup import TrainingSetup, open_setup
from moexp.runtime.opening import method_of, opened_store
from moexp.tables.draftexpert.labels import LOSSES
from moexp.target.draft_expert import HEADER, DraftExperts, load_draft_experts, read_header, save_draft_experts
from moexp.target.load import target_identity

TERMS = ("residual", "logit", "token", "router")
TERMS_OF = {LOSSES[1]: TERMS[:1], LOSSES[2]: TERMS[:3], LOSSES[3]: TERMS}


def with_terms(section: DraftSection, terms: tuple[str, ...], steps: int) -> DraftSection:
    """The section with so many end-to-end steps and only these losses, at the recipe's weights.

    The time cap shrinks with the steps, so that it bites where it would bite in the recipe's own training.
    """
    losses = {name: getattr(section, name).model_copy(update={"enabled": name in terms}) for name in TERMS}
    cap = section.max_minutes
    if cap is not None:
        cap *= (section.warmup_steps + steps) / max(1, section.warmup_steps + section.steps)
    return section.model_copy(update={**losses, "steps": steps, "max_minutes": cap})


def ablation_folder(recipe: Recipe, loss: str) -> Path:
    """Where the checkpoint of a row lies."""
    name = loss.removeprefix("+ ").replace("/", "-")
    folder = artifact_path("ablations", recipe, "target", "draft", "seed")
    return folder / f"{LOSSES.index(loss)}-{name}-{recipe.bench.ablation_steps}-steps"


def train_rows(recipe: Recipe, target: Path, provenance: dict[str, Any]) -> list[dict[str, Any]]:
    """Trains and measures what is missing of table 5's rows; returns {loss, steps, metrics} of all four."""
    identity = target_identity(target)
    folder = draft_folder(recipe)

    @cache
    def setup() -> TrainingSetup:
        return open_setup(recipe, target, folder)

    warm: DraftExperts | None = None
    rows = [{"loss": LOSSES[0], "steps": None, "metrics": _untrained(folder, identity)}]
    for loss, terms in TERMS_OF.items():
        row_folder = ablation_folder(recipe, loss)
        if not _is_for(row_folder, identity):
            section = with_terms(recipe.draft, terms, recipe.bench.ablation_steps)
            if warm is None:
                only_warm_up = section.model_copy(update={"steps": 0})
                warm, _ = fit(setup(), only_warm_up, recipe.seed, label="Table 5")
            experts = copy.deepcopy(warm)
            metrics = _train_row(setup(), section, experts, recipe.seed, loss)
            details = {"loss": loss, "steps": section.steps, "metrics": metrics, "provenance": provenance}
            save_draft_experts(row_folder, experts.to(torch.bfloat16), identity, details)
        header = read_header(row_folder)
        rows.append({"loss": loss, "steps": header["steps"], "metrics": header["metrics"]})
    if rows[0]["metrics"] is None:  # draft experts from elsewhere, without figures of what they were compared with
        rows[0]["metrics"] = measure(setup(), None)
    return rows


def run_ablation(setup: Setup, folder: Path) -> None:
    """Trains the rows, decodes a little with each for its prefetch hits, and keeps both in `folder`.

    Args:
        setup: its target is not padded.
    """
    recipe, target, bench = setup.recipe, setup.target, setup.recipe.bench
    rows = train_rows(recipe, target.folder, collect_provenance(recipe.seed))
    base = dataclasses.replace(method_of(recipe.decode), r=1, prefetch=True)
    methods = [
        dataclasses.replace(base, drafter="top-r" if loss == LOSSES[0] else "draft-expert", name=loss)
        for loss in LOSSES
    ]
    jobs = setup.jobs(min(bench.paced_prompts, bench.prompts_per_workload))
    plan = setup.plan(jobs, methods, min(bench.max_new_tokens, bench.paced_new_tokens))
    done = begin_run(folder, setup.settings(plan, "measured", rows=rows))
    if plan.is_complete(done):
        return
    add_provenance(folder, recipe.seed)
    identity = target_identity(target.folder)
    with opened_store(target, StoreSection(kind="host", policy="none", io_threads=recipe.store.io_threads)) as store:
        for method in methods:
            experts = None
            if method.name != LOSSES[0]:
                experts = load_draft_experts(ablation_folder(recipe, method.name), identity, dtype=target.dtype)
            engine = PromptEngine(target, store, draft_experts=experts)
            part = dataclasses.replace(plan, methods=[method], title=f"Prefetch hits, {method.name}")
            run_methods(engine, part, folder, done=done)


def _train_row(
    setup: TrainingSetup, section: DraftSection, experts: DraftExperts, seed: int, loss: str
) -> dict[str, Any]:
    path = DraftPath(setup.model, experts)
    settings = settings_of(section, seed)
    with followed(f"Table 5, {loss}", settings.main.steps, "kl") as on_step:
        distill(path, setup.train_NL, settings, Run(on_step=on_step))
    with stage(f"Table 5, {loss}, measure", None):
        return measure(setup, experts)


def _untrained(folder: Path, identity: str) -> dict[str, Any] | None:
    """What shared + top-1 reached when the draft experts of a folder were measured; None where it does not say."""
    if not _is_for(folder, identity):
        return None
    metrics = (read_header(folder).get("metrics") or {}).get("top-1")
    return metrics if isinstance(metrics, dict) else None


def _is_for(folder: Path, identity: str) -> bool:
    return (folder / HEADER).exists() and read_header(folder)["target"] == identity
