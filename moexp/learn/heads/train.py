"""`moexp train-drafter`: a head that drafts from the target's hidden states, trained online and measured held out.

EAGLE-3 and MTP heads start from parts of the target; GTO goes on from the EAGLE-3 head of the same recipe.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moexp.base import ranks
from moexp.base.errors import MoexpError
from moexp.base.progress import note_of, stage
from moexp.config.recipe import Recipe
from moexp.config.sections import HeadSection
from moexp.learn.core.loop import Metrics, Schedule
from moexp.learn.draft_expert.train import Bench, open_bench
from moexp.learn.heads.eagle import HeadSettings, measure_eagle, train_eagle
from moexp.learn.heads.gto import TreeSettings, train_gto
from moexp.learn.heads.mtp import measure_mtp, train_mtp
from moexp.learn.heads.start import start_by_least_squares
from moexp.target.heads.draft_vocab import coverage, pick_draft_vocab, token_counts
from moexp.target.heads.eagle_files import load_eagle_head, save_eagle_head
from moexp.target.heads.eagle_head import EagleConfig, EagleHead, new_eagle_head
from moexp.target.heads.eagle_head import start_from_target as start_eagle
from moexp.target.heads.mtp_files import save_mtp_head
from moexp.target.heads.mtp_head import MtpHead, new_mtp_head
from moexp.target.heads.mtp_head import start_from_target as start_mtp
from moexp.target.spec import MoESpec

HELD_ROWS = 24  # every position of a row counts, so few rows will do
START_ROWS = 64  # corpus rows that a head's first guess is fitted to

OnStep = Callable[[int, Metrics], None]


def head_settings(section: HeadSection, seed: int) -> HeadSettings:
    """How the section's head is trained."""
    schedule = Schedule(section.steps, section.lr, warmup=10, max_minutes=section.max_minutes)
    return HeadSettings(
        schedule, steps=section.unroll, decay=section.decay, rows=section.rows, seed=seed, optimizer=section.optimizer
    )


def train_head_of(
    recipe: Recipe, target: Path, out: Path, *, start: Path | None, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Trains and saves the recipe's head for the target in `target`; returns what was measured on held-out rows.

    Args:
        start: of `gto`: the folder of the EAGLE-3 head to go on from.

    Raises:
        MoexpError: `gto` without a head to go on from.
    """
    section, work = recipe.head, out.with_name(out.name + ".work")
    bench = open_bench(recipe, target, work)
    settings = head_settings(section, recipe.seed)
    head, details = _new_head(section, bench, start, recipe.seed)
    identity = f"{bench.identity}:{recipe.digest('head', 'draft.corpus', 'seed')}"
    log: list[dict[str, Any]] = []
    title = {"eagle3": "EAGLE-3", "mtp": "MTP", "gto": "GTO"}[section.kind]
    with stage(f"Train the {title} head", section.steps) as advance:

        def on_step(step: int, metrics: Metrics) -> None:
            advance(step, note_of(metrics, "kl", "acceptance_1"))
            log.append({"step": step, **metrics})

        _train(section, head, bench, settings, work / "state", identity, on_step)

    def finish() -> Metrics:
        with stage("Measure on held-out text", None):
            held = _measured(head.to(bench.model.dtype), bench, section.unroll)
        made = details | {
            "kind": section.kind,
            "metrics": held,
            "training": {"tokens": bench.train_NL.numel(), "last": log[-1] if log else None, "log": log},
            "recipe": json.loads(section.model_dump_json()),
            "provenance": provenance,
        }
        if isinstance(head, EagleHead):
            save_eagle_head(out, head.to(torch.bfloat16), bench.identity, made)
        else:
            save_mtp_head(out, head.to(torch.bfloat16), bench.identity, made)
        shutil.rmtree(work / "state", ignore_errors=True)
        return held

    return ranks.on_main(finish)


def _new_head(
    section: HeadSection, bench: Bench, start: Path | None, seed: int
) -> tuple[EagleHead | MtpHead, dict[str, Any]]:
    """The head as training finds it, in fp32, and what is worth keeping of how it was made."""
    model: Any = bench.model
    if section.kind == "mtp":
        mtp = new_mtp_head(model, seed=seed).float().to(model.device)
        start_mtp(mtp, model.model.norm)
        return mtp, {"start_loss": start_by_least_squares(mtp, model, bench.train_NL[:START_ROWS])}
    if section.kind == "gto":
        if start is None:
            raise MoexpError("GTO goes on from an EAGLE-3 head", where="head.kind", valid="train one first")
        spec = MoESpec.from_config(model.config)
        embedding = model.get_input_embeddings()
        head = load_eagle_head(start, spec, embedding, fingerprint=bench.identity, dtype=torch.float32)
        return head.to(model.device), {"start": str(start)}
    vocab = int(model.config.vocab_size)
    counts_V = token_counts(bench.train_NL, vocab)
    special = [int(token) for token in bench.tokenizer.all_special_ids]
    draft = pick_draft_vocab(counts_V, section.draft_vocab or vocab, always=special)
    config = EagleConfig.for_target(model.config, section.draft_vocab or vocab)
    eagle = new_eagle_head(config, draft, model.get_input_embeddings(), seed=seed).float().to(model.device)
    with torch.no_grad():
        start_eagle(eagle, model.model.norm, model.lm_head)
    loss = start_by_least_squares(eagle, model, bench.train_NL[:START_ROWS])
    return eagle, {
        "start_loss": loss,
        "draft_vocab": section.draft_vocab or vocab,
        "coverage": coverage(draft, counts_V),
    }


def _train(
    section: HeadSection,
    head: EagleHead | MtpHead,
    bench: Bench,
    settings: HeadSettings,
    checkpoint: Path,
    identity: str,
    on_step: OnStep,
) -> None:
    shared: dict[str, Any] = {"checkpoint": checkpoint, "identity": identity, "on_step": on_step}
    if isinstance(head, MtpHead):
        train_mtp(head, bench.model, bench.train_NL, settings, **shared)
    elif section.kind == "gto":
        tree = TreeSettings(depth=section.unroll, width=section.tree_width, weight=section.tree_weight)
        train_gto(head, bench.model, bench.train_NL, settings, tree, **shared)
    else:
        train_eagle(head, bench.model, bench.train_NL, settings, **shared)


def _measured(head: EagleHead | MtpHead, bench: Bench, steps: int) -> Metrics:
    if isinstance(head, MtpHead):
        return measure_mtp(head, bench.model, bench.held_NL[:HELD_ROWS], steps=steps)
    return measure_eagle(head, bench.model, bench.held_NL[:HELD_ROWS], steps=steps)
