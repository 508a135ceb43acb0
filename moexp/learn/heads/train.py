"""`moexp train-drafter`: a head that drafts from the target's hidden states, trained online and measured held out.

EAGLE-3 and MTP heads start from parts of the target; GTO goes on from the EAGLE-3 head of the same recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moexp.base.errors import MoexpError
from moexp.config.learn import HeadSection
from moexp.config.recipe import Recipe
from moexp.learn.core.loop import Run, Schedule, followed
from moexp.learn.heads.fit import measure_head, train_head
from moexp.learn.heads.gto import TreeSettings
from moexp.learn.heads.start import start_by_least_squares
from moexp.learn.heads.unrolled import HeadSettings
from moexp.learn.setup import TrainingSetup, open_setup
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
TITLES = {"eagle3": "EAGLE-3", "mtp": "MTP", "gto": "GTO"}


def train_head_of(
    recipe: Recipe, target: Path, out: Path, *, start: Path | None, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Trains and saves the recipe's head for the target in `target`; returns what was measured on held-out rows.

    Args:
        start: of `gto`: the folder of the EAGLE-3 head to go on from.

    Raises:
        MoexpError: `gto` without a head to go on from.
    """
    section = recipe.head
    setup = open_setup(recipe, target, out)
    head, details = _new_head(section, setup, start, recipe.seed)
    settings = HeadSettings(
        Schedule(section.steps, section.lr, warmup=10, max_minutes=section.max_minutes),
        steps=section.unroll,
        decay=section.decay,
        rows=section.rows,
        seed=recipe.seed,
        optimizer=section.optimizer,
    )
    tree = None
    if section.kind == "gto":
        tree = TreeSettings(depth=section.unroll, width=section.tree_width, weight=section.tree_weight)
    identity = f"{setup.identity}:{recipe.digest('head', 'draft.corpus', 'seed')}"
    log: list[dict[str, Any]] = []
    with followed(f"Train the {TITLES[section.kind]} head", section.steps, "kl", "acceptance_1", log=log) as on_step:
        train_head(head, setup.model, setup.train_NL, settings, tree, Run(setup.state, identity, on_step))

    def measured() -> dict[str, Any]:
        held = head.to(setup.model.dtype)
        return measure_head(held, setup.model, setup.held_NL[:HELD_ROWS], steps=section.unroll)

    def save(metrics: dict[str, Any]) -> None:
        header = details | {
            "kind": section.kind,
            "metrics": metrics,
            "training": {"tokens": setup.train_NL.numel(), "last": log[-1] if log else None, "log": log},
            "recipe": section.model_dump(mode="json"),
            "provenance": provenance,
        }
        if isinstance(head, EagleHead):
            save_eagle_head(out, head.to(torch.bfloat16), setup.identity, header)
        else:
            save_mtp_head(out, head.to(torch.bfloat16), setup.identity, header)

    return setup.finish(measured, save)


def _new_head(
    section: HeadSection, setup: TrainingSetup, start: Path | None, seed: int
) -> tuple[EagleHead | MtpHead, dict[str, Any]]:
    """The head as training begins with it, in fp32, and what its header says of the start."""
    model: Any = setup.model
    if section.kind == "mtp":
        mtp = new_mtp_head(model, seed=seed).float().to(model.device)
        start_mtp(mtp, model.model.norm)
        return mtp, {"start_loss": start_by_least_squares(mtp, model, setup.train_NL[:START_ROWS])}
    if section.kind == "gto":
        if start is None:
            raise MoexpError("GTO goes on from an EAGLE-3 head", where="head.kind", valid="train one first")
        spec = MoESpec.from_config(model.config)
        embedding = model.get_input_embeddings()
        head = load_eagle_head(start, spec, embedding, fingerprint=setup.identity, dtype=torch.float32)
        return head.to(model.device), {"start": str(start)}
    vocab = int(model.config.vocab_size)
    drafted = section.draft_vocab or vocab
    counts_V = token_counts(setup.train_NL, vocab)
    special = [int(token) for token in setup.tokenizer.all_special_ids]
    draft = pick_draft_vocab(counts_V, drafted, always=special)
    config = EagleConfig.for_target(model.config, drafted)
    eagle = new_eagle_head(config, draft, model.get_input_embeddings(), seed=seed).float().to(model.device)
    start_eagle(eagle, model.model.norm, model.lm_head)
    loss = start_by_least_squares(eagle, model, setup.train_NL[:START_ROWS])
    return eagle, {"start_loss": loss, "draft_vocab": drafted, "coverage": coverage(draft, counts_V)}
