"""`moexp train-draft-expert`: the target in memory, its corpora, both stages of distillation, and what they reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from moexp.base import ranks
from moexp.base.compute import training_device
from moexp.base.progress import Advance, note_of, stage
from moexp.config.recipe import Recipe
from moexp.config.sections import DraftSection
from moexp.learn.core.loop import Metrics, Schedule
from moexp.learn.corpus.files import corpus_rows, load_rows, shipped_corpora
from moexp.learn.draft_expert.distill import DistillSettings, Weights, distill, start_from_neurons, warm_up
from moexp.learn.draft_expert.measure import Acceptance, Agreement, held_contexts, measure_acceptance, measure_agreement
from moexp.learn.draft_expert.path import DraftPath
from moexp.target.draft_expert import DraftExperts, save_draft_experts
from moexp.target.load import target_identity
from moexp.target.pack_format import refuse_packed
from moexp.target.tokenizer import load_tokenizer

CONTEXT_STARTS = tuple(range(64, 256, 24))  # positions of a held-out row at which blocks start
AGREEMENT_ROWS = 12  # every position of a row counts, so few rows will do
START_TOKENS = 4096  # tokens that decide which neurons a draft expert starts from


@dataclass
class Bench:
    """A target in memory with rows to train on and rows held out; draft experts come and go."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: str
    train_NL: Tensor
    held_NL: Tensor
    contexts: DynamicCache | None = None
    """The target's keys and values of the held-out rows, once a draft path was measured on them."""


def open_bench(recipe: Recipe, target: Path, work: Path) -> Bench:
    """Loads the target with its experts onto the recipe's device, and the corpora that the draft section names."""
    refuse_packed(target)
    with stage("Load the target", None):
        model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, recipe.target.dtype)).eval()
        model.to(training_device(recipe.device))
        tokenizer = load_tokenizer(target)
    section = recipe.draft.corpus
    authors = ("dense", "target") if section.author == "both" else (section.author,)
    if section.source == "write":
        authors = ("target",)
    rows = [
        corpus_rows(section, model, tokenizer, work / f"corpus-{author}", author=author, seed=recipe.seed)
        for author in authors
    ]
    held = recipe.draft.held_out_rows
    shipped = shipped_corpora("held") if section.source == "shipped" else []
    if shipped:  # written by the pocket target at temperature 1, from scripts that no training text has
        held_NL, train_NL = load_rows(shipped[0], tokenizer)[:held], torch.cat(rows)
    else:
        held_NL = rows[-1][:held]  # by the target itself, where there is such a corpus
        train_NL = torch.cat([*rows[:-1], rows[-1][held:]])
    order = torch.randperm(len(train_NL), generator=torch.Generator().manual_seed(recipe.seed))
    train_NL = train_NL[order][: max(1, section.tokens // train_NL.shape[1])]
    return Bench(model, tokenizer, target_identity(target), train_NL, held_NL)


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
    bench: Bench,
    section: DraftSection,
    settings: DistillSettings,
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    log: list[dict[str, Any]] | None = None,
    label: str = "Distil",
) -> DraftExperts:
    """New draft experts, trained. `log` receives a record a step."""
    torch.manual_seed(settings.seed)
    plain = DraftPath(bench.model, None)
    experts = DraftExperts(plain.spec.hidden_size, section.width, plain.spec.moe_layers).to(bench.model.device)
    if section.init == "neurons":
        rows = max(1, START_TOKENS // bench.train_NL.shape[1])
        start_from_neurons(plain, experts, bench.train_NL[:rows])
    path = DraftPath(bench.model, experts)

    folders = [None, None] if checkpoint is None else [checkpoint / "warm-up", checkpoint / "end-to-end"]
    stages = [
        ("warm-up", warm_up, settings.warmup, folders[0]),
        ("end-to-end", distill, settings.main, folders[1]),
    ]
    if ranks.on_main(lambda: folders[1] is not None and folders[1].exists()):
        stages = stages[1:]  # its checkpoint already holds what stage one learned
    for name, run, schedule, folder in stages:
        if schedule.steps:
            with stage(f"{label}, {name}", schedule.steps) as advance:
                watch = _watcher(name, advance, log)
                run(path, bench.train_NL, settings, checkpoint=folder, identity=identity, on_step=watch)
    return experts


def _watcher(name: str, advance: Advance, log: list[dict[str, Any]] | None) -> Callable[[int, Metrics], None]:
    shown = "residual" if name == "warm-up" else "kl"

    def on_step(step: int, metrics: Metrics) -> None:
        advance(step, note_of(metrics, shown))
        if log is not None:
            log.append({"stage": name, "step": step, **metrics})

    return on_step


def context_starts(length: int) -> list[int]:
    """Where held-out blocks start in rows of `length` tokens: those of `CONTEXT_STARTS` with text before them."""
    return [start for start in CONTEXT_STARTS if start <= length] or [length // 2]


def measure(bench: Bench, experts: DraftExperts | None, top_r: int = 1, draft_length: int = 4) -> dict[str, Any]:
    """Agreement, KL, router agreement and acceptance on the held-out rows."""
    held = experts.to(bench.model.dtype) if experts is not None else None
    path = DraftPath(bench.model, held, top_r=top_r, same_kernels=True)
    agreement: Agreement = measure_agreement(path, bench.held_NL[:AGREEMENT_ROWS])
    starts = context_starts(bench.held_NL.shape[1])
    if bench.contexts is None:
        bench.contexts = held_contexts(path, bench.held_NL, starts)
    acceptance: Acceptance = measure_acceptance(path, bench.held_NL, starts, draft_length, bench.contexts)
    return {**asdict(agreement), **asdict(acceptance)}


def train_draft_expert(recipe: Recipe, target: Path, out: Path, *, provenance: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves the recipe's draft experts for the target in `target`; returns what was measured."""
    work = out.with_name(out.name + ".work")
    bench = open_bench(recipe, target, work)
    identity = f"{bench.identity}:{recipe.digest('draft', 'seed')}"
    log: list[dict[str, Any]] = []
    experts = fit(
        bench, recipe.draft, settings_of(recipe.draft, recipe.seed),
        checkpoint=work / "state", identity=identity, log=log,
    )  # fmt: skip

    def finish() -> dict[str, Any]:
        with stage("Measure on held-out text", None):
            metrics = {f"top-{r}": measure(bench, None, top_r=r) for r in (1, 2, 3)}
            metrics["draft-expert"] = measure(bench, experts)
        details = {
            "metrics": metrics,
            "training": {"tokens": bench.train_NL.numel(), "last": log[-1] if log else None},
            "recipe": json.loads(recipe.model_dump_json())["draft"],
            "provenance": provenance,
        }
        save_draft_experts(out, experts.to(torch.bfloat16), bench.identity, details)
        shutil.rmtree(work / "state", ignore_errors=True)
        return metrics

    return ranks.on_main(finish)
