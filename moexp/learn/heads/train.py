"""`moexp train-drafter`: a head that drafts from the target's hidden states, trained online and measured held out.

EAGLE-3 and MTP heads start from parts of the target; GTO goes on from the EAGLE-3 head of the same recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moexp.base.errors import MoexpError
from moexp.config.learn import HeadSection
from moexp.config.recipe import Recipe
from moexp.learn.core.loop import UNSAVED, Metrics, Run, Schedule, followed, own_rows, train
from moexp.learn.core.optimizers import Updates
from moexp.learn.heads.chains import Chains, TargetPass
from moexp.learn.heads.gto import TreeSettings, group_roots, tree_loss
from moexp.learn.heads.start import start_by_least_squares
from moexp.learn.heads.unrolled import HeadSettings, unrolled_loss
from moexp.learn.setup import TrainingSetup, open_setup
from moexp.target.heads.draft_vocab import coverage, pick_draft_vocab, token_counts
from moexp.target.heads.eagle_files import load_eagle_head, save_eagle_head
from moexp.target.heads.eagle_head import EagleConfig, EagleHead, new_eagle_head
from moexp.target.heads.eagle_head import start_from_target as start_eagle
from moexp.target.heads.head import frozen_copy
from moexp.target.heads.mtp_files import save_mtp_head
from moexp.target.heads.mtp_head import MtpHead, new_mtp_head
from moexp.target.heads.mtp_head import start_from_target as start_mtp
from moexp.target.spec import MoESpec

HELD_ROWS = 24  # every position of a row counts, so few rows will do
START_ROWS = 64  # corpus rows that a head's first guess is fitted to
TITLES = {"eagle3": "EAGLE-3", "mtp": "MTP", "gto": "GTO"}


def train_head(
    head: EagleHead | MtpHead,
    model: PreTrainedModel,
    corpus_NL: Tensor,
    settings: HeadSettings,
    tree: TreeSettings | None = None,
    run: Run = UNSAVED,
) -> int:
    """Trains a head (fp32) in place, online; returns the updates made. Resumes exactly.

    With `tree` an EAGLE-3 head goes on by GTO. The reference is the head as given: a resumed run needs the same one.
    """
    reference = frozen_copy(head) if tree is not None else None
    target = TargetPass(model, head.feature_layers)

    def step_fn(step: int) -> Metrics:
        rows_BL = own_rows(corpus_NL, settings.rows, step, settings.seed).long().to(model.device)
        cache = DynamicCache(config=model.config) if tree is not None else None
        seen = target(rows_BL, cache)
        with settings.precision(model.device):
            chains = Chains(head, rows_BL, seen.features_BLF)
        loss, metrics = unrolled_loss(chains, rows_BL, seen, model, settings)
        if tree is not None:
            assert isinstance(reference, EagleHead) and cache is not None
            roots_R = group_roots(rows_BL.shape[1] - 1, tree, settings.seed, step).to(rows_BL.device)
            with settings.precision(model.device):
                surrogate, more = tree_loss(chains, reference, rows_BL, seen, model, cache, roots_R, tree)
            loss = loss + tree.weight * surrogate
            metrics |= more | {"loss": float(loss.detach())}
        loss.backward()
        return metrics

    named = head.train().trainable()
    for parameter in named.values():
        parameter.requires_grad_(True)
    return train(named, settings.schedule, step_fn, Updates(settings.optimizer, settings.clip), run)


@torch.no_grad()
def measure_head(
    head: EagleHead | MtpHead, model: PreTrainedModel, rows_NL: Tensor, *, steps: int = 3, batch: int = 8
) -> Metrics:
    """The metrics of `unrolled_loss` on held-out rows, without decay and token loss; means weighted by rows."""
    target = TargetPass(model, head.feature_layers)
    low = next(head.parameters()).dtype != torch.float32
    settings = HeadSettings(Schedule(0, 0.0), steps=steps, decay=1.0, autocast=low, token_weight=0.0)
    sums: Metrics = {}
    for rows_BL in rows_NL.long().to(model.device).split(batch):
        seen = target(rows_BL)
        with settings.precision(model.device):
            chains = Chains(head, rows_BL, seen.features_BLF)
        _, metrics = unrolled_loss(chains, rows_BL, seen, model, settings)
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value * len(rows_BL) / len(rows_NL)
    return sums


def train_head_of(
    recipe: Recipe, target: Path, out: Path, *, start: Path | None, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Trains and saves the recipe's head for the target in `target`; returns what was measured on held-out rows.

    `start` is the folder of the EAGLE-3 head that `gto` goes on from; MoexpError where it is missing.
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
        save_head: Any = save_eagle_head if isinstance(head, EagleHead) else save_mtp_head
        save_head(out, head.to(torch.bfloat16), setup.identity, header)

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
