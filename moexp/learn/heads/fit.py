"""Training a draft head against the frozen target, online (nothing but token ids is stored), and measuring it.

Each batch runs the target once, for the states that the head reads and the distributions it is taught; then the head.

Shape suffixes: B rows of a batch, N rows, L tokens a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moexp.learn.core.loop import UNSAVED, Metrics, Run, Schedule, own_rows, train
from moexp.learn.core.optimizers import Updates
from moexp.learn.heads.chains import Chains, TargetPass
from moexp.learn.heads.gto import TreeSettings, group_roots, tree_loss
from moexp.learn.heads.unrolled import HeadSettings, unrolled_loss
from moexp.target.heads.eagle_head import EagleHead
from moexp.target.heads.head import frozen_copy
from moexp.target.heads.mtp_head import MtpHead


def train_head(
    head: EagleHead | MtpHead,
    model: PreTrainedModel,
    corpus_NL: Tensor,
    settings: HeadSettings,
    tree: TreeSettings | None = None,
    run: Run = UNSAVED,
) -> int:
    """Trains a head (fp32) in place; returns the updates made. Resumes exactly.

    Args:
        tree: goes on training an EAGLE-3 head by GTO. The reference is the head as it is given: a resumed run must be
            given the same one again, before any update.

    Metrics of a step: those of `unrolled_loss`, with `tree` also those of `tree_loss`.
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
