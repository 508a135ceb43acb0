"""Training an MTP head (DeepSeek-V3) on a frozen target, online, over several draft steps that feed its own state.

The logits are the target's own projection of the head's states, so the loss is the distillation loss on logits of
`kd.py`: per step KL(target || head) plus, with a weight, cross-entropy against the target's most likely token.

Shape suffixes: B rows, L tokens a row, T positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moexp.base.errors import MoexpError
from moexp.learn.core.logit_loss import logit_loss
from moexp.learn.core.loop import Metrics, Schedule, own_rows
from moexp.learn.heads.chains import Chains, Seen, TargetPass, tokens_at_step
from moexp.learn.heads.eagle import HeadSettings, OnStep, head_autocast, train_head
from moexp.target.heads.mtp_head import MtpHead


def train_mtp(
    head: MtpHead,
    model: PreTrainedModel,
    corpus_NL: Tensor,
    settings: HeadSettings,
    *,
    token_weight: float = 0.1,
    checkpoint: Path | None = None,
    identity: str = "",
    on_step: OnStep = lambda step, metrics: None,
) -> int:
    """Trains a head (fp32) in place against the frozen target; returns the updates made. Resumes exactly.

    Metrics of a step: `loss`, `kl` (mean over steps), and for each draft step s from 1 `acceptance_s`, the share of
    positions where the head's most likely token is the target's.
    """
    target = TargetPass(model, head.feature_layers)

    def step_fn(step: int) -> Metrics:
        rows = own_rows(len(corpus_NL), settings.rows, step, settings.seed)
        rows_BL = corpus_NL[rows].long().to(model.device)
        loss, metrics = mtp_loss(head, rows_BL, target(rows_BL), model, settings, token_weight)
        loss.backward()
        return metrics

    return train_head(head, settings, step_fn, checkpoint, identity, on_step)


def mtp_loss(
    head: MtpHead,
    rows_BL: Tensor,
    seen: Seen,
    model: PreTrainedModel,
    settings: HeadSettings,
    token_weight: float,
) -> tuple[Tensor, Metrics]:
    """Loss over all draft steps of all positions, and metrics.

    Raises:
        MoexpError: rows that are too short for so many steps.
    """
    length = rows_BL.shape[1]
    if length <= settings.steps + 1:
        raise MoexpError(f"rows of {length} tokens for {settings.steps} draft steps", valid=f"{settings.steps + 2} up")
    head_VH = head.shared.lm_head.weight.detach()
    loss = torch.zeros((), device=rows_BL.device)
    metrics: Metrics = {}
    kl = 0.0
    with head_autocast(model, settings.autocast):
        chains = Chains(head, rows_BL, seen.features_BLF)
    for step in range(settings.steps):
        if step:
            with head_autocast(model, settings.autocast):
                chains.extend(tokens_at_step(rows_BL, step))
        live = length - 1 - step  # roots whose next token is still inside the row
        result = logit_loss(
            chains.hidden[:, :live].flatten(0, 1).to(head_VH.dtype),
            seen.final_BLH[:, step + 1 : step + 1 + live].flatten(0, 1),
            head_VH,
            head_VH,
            token_weight=token_weight,
        )
        loss = loss + settings.decay**step * result.loss / result.tokens
        kl += result.kl / result.tokens / settings.steps
        metrics[f"acceptance_{step + 1}"] = result.agree / result.tokens
    return loss, {"loss": float(loss.detach()), "kl": kl, **metrics}


@torch.no_grad()
def measure_mtp(head: MtpHead, model: PreTrainedModel, rows_NL: Tensor, *, steps: int = 3, batch: int = 8) -> Metrics:
    """The metrics of `train_mtp` on held-out rows, without training; means weighted by rows."""
    target = TargetPass(model, head.feature_layers)
    low = head.eh_proj.weight.dtype != torch.float32
    settings = HeadSettings(Schedule(0, 0.0), steps=steps, decay=1.0, autocast=low)
    sums: Metrics = {}
    for rows_BL in rows_NL.long().to(model.device).split(batch):
        _, metrics = mtp_loss(head, rows_BL, target(rows_BL), model, settings, 0.0)
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value * len(rows_BL) / len(rows_NL)
    return sums
