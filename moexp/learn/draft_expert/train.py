"""`moexp train-draft-expert`: both stages of distillation, and what the draft experts reach on held-out text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moexp.base import ranks
from moexp.config.learn import DraftSection
from moexp.config.recipe import Recipe
from moexp.learn.core.loop import UNSAVED, Run, Schedule, followed
from moexp.learn.draft_expert.distill import DistillSettings, distill, warm_up
from moexp.learn.draft_expert.losses import Weights
from moexp.learn.draft_expert.measure import held_contexts, measure_acceptance, measure_agreement
from moexp.learn.draft_expert.path import DraftPath
from moexp.learn.draft_expert.start import start_from_neurons
from moexp.learn.setup import TrainingSetup, open_setup
from moexp.target.draft_expert import DraftExperts, save_draft_experts

CONTEXT_STARTS = tuple(range(64, 256, 24))  # positions of a held-out row at which blocks start
AGREEMENT_ROWS = 12  # every position of a row counts, so few rows will do
START_TOKENS = 4096  # tokens that decide which neurons a draft expert starts from


def settings_of(section: DraftSection, seed: int) -> DistillSettings:
    """The section's settings: 15% of a time cap goes to the warm-up."""
    cap = section.max_minutes
    terms = {
        name: getattr(section, name).weight if getattr(section, name).enabled else 0.0
        for name in ("logit", "token", "residual", "router")
    }
    return DistillSettings(
        warmup=Schedule(section.warmup_steps, section.warmup_lr, warmup=5, max_minutes=cap and cap * 0.15),
        main=Schedule(section.steps, section.lr, warmup=5, max_minutes=cap and cap * 0.85),
        weights=Weights(**terms, temperature=section.logit.temperature),
        context=section.context,
        rows=section.rows,
        warmup_rows=section.warmup_rows,
        block=section.block_length,
        seed=seed,
        optimizer=section.optimizer,
    )


def fit(
    setup: TrainingSetup, section: DraftSection, seed: int, *, label: str = "Distil", run: Run = UNSAVED
) -> tuple[DraftExperts, dict[str, Any] | None]:
    """New draft experts, trained, and the metrics of the last step.

    Args:
        label: names the training in the progress of its stages.
        run: folder and identity of the checkpoints; each stage has a subfolder.
    """
    settings = settings_of(section, seed)
    torch.manual_seed(seed)
    plain = DraftPath(setup.model, None)
    experts = DraftExperts(plain.spec.hidden_size, section.width, plain.spec.moe_layers).to(setup.model.device)
    if section.init == "neurons":
        rows = max(1, START_TOKENS // setup.train_NL.shape[1])
        start_from_neurons(plain, experts, setup.train_NL[:rows])
    path = DraftPath(setup.model, experts)
    folder, last = run.checkpoint, None
    stages = [("warm-up", warm_up, settings.warmup, "residual"), ("end-to-end", distill, settings.main, "kl")]
    if ranks.on_main(lambda: folder is not None and (folder / "end-to-end").exists()):
        stages = stages[1:]  # its checkpoint already holds what stage one learned
    for name, train_stage, schedule, shown in stages:
        if schedule.steps:
            log: list[dict[str, Any]] = []
            with followed(f"{label}, {name}", schedule.steps, shown, log=log) as on_step:
                stage_run = Run(folder and folder / name, run.identity, on_step)
                train_stage(path, setup.train_NL, settings, stage_run)
            last = {"stage": name, **log[-1]} if log else last
    return experts, last


def context_starts(length: int) -> list[int]:
    """Where held-out blocks start in rows of `length` tokens: those of `CONTEXT_STARTS` with text before them."""
    return [start for start in CONTEXT_STARTS if start <= length] or [length // 2]


def measure(setup: TrainingSetup, experts: DraftExperts | None, top_r: int = 1) -> dict[str, Any]:
    """Agreement, KL, router agreement and acceptance on the held-out rows."""
    held = experts.to(setup.model.dtype) if experts is not None else None
    path = DraftPath(setup.model, held, top_r=top_r, same_kernels=True)
    agreement = measure_agreement(path, setup.held_NL[:AGREEMENT_ROWS])
    starts = context_starts(setup.held_NL.shape[1])
    if setup.contexts is None:
        setup.contexts = held_contexts(path, setup.held_NL, starts)
    acceptance = measure_acceptance(path, setup.held_NL, starts, contexts=setup.contexts)
    return {**asdict(agreement), **asdict(acceptance)}


def train_draft_expert(recipe: Recipe, target: Path, out: Path, *, provenance: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves the recipe's draft experts for the target in `target`; returns what was measured."""
    setup = open_setup(recipe, target, out)
    identity = f"{setup.identity}:{recipe.digest('draft', 'seed')}"
    experts, last = fit(setup, recipe.draft, recipe.seed, run=Run(setup.state, identity))

    def measured() -> dict[str, Any]:
        metrics = {f"top-{r}": measure(setup, None, top_r=r) for r in (1, 2, 3)}
        return {**metrics, "draft-expert": measure(setup, experts)}

    def save(metrics: dict[str, Any]) -> None:
        details = {
            "metrics": metrics,
            "training": {"tokens": setup.train_NL.numel(), "last": last},
            "recipe": recipe.draft.model_dump(mode="json"),
            "provenance": provenance,
        }
        save_draft_experts(out, experts.to(torch.bfloat16), setup.identity, details)

    return setup.finish(measured, save)
