"""Training an EAGLE-3 head (training-time test, arXiv 2503.01840), online: nothing but token ids is stored.

Each batch runs the frozen target once, for the states that the head fuses and for the distributions it is taught; then
the head, for several draft steps as in decoding (`chains.py`). The loss is sum over steps s of decay^s H(p', q_s), each
a mean over the positions whose most likely token can be drafted.

Shape suffixes: B rows, L tokens a row, n = L - 1 roots, F, H, V, D as in `draft_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moexp.base import ranks
from moexp.base.errors import MoexpError
from moexp.learn.core.loop import Metrics, Schedule, own_rows, train
from moexp.learn.core.optimizers import OptimizerName
from moexp.learn.heads.chains import Chains, Seen, TargetPass, tokens_at_step
from moexp.learn.heads.loss import Teacher, head_loss, read_teacher
from moexp.target.heads.eagle_head import EagleHead
from moexp.target.heads.mtp_head import MtpHead

OnStep = Callable[[int, Metrics], None]


@dataclass(frozen=True)
class HeadSettings:
    """How a head is trained.

    Attributes:
        schedule: updates and learning rate.
        steps: draft steps of the training-time test; 1 trains on true states alone.
        decay: weight of a step relative to the one before.
        rows: corpus rows a batch.
        clip: largest norm of the gradient.
        seed: of the batches.
        autocast: run the head in bf16 (its weights and losses stay in fp32).
        optimizer: "muon" learns the layer's matrices by Muon and the rest by AdamW.
    """

    schedule: Schedule
    steps: int = 3
    decay: float = 0.8
    rows: int = 8
    clip: float = 0.5
    seed: int = 0
    autocast: bool = True
    optimizer: OptimizerName = "adamw"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise MoexpError(f"{self.steps} draft steps", valid="from 1")
        if not 0 < self.decay <= 1:
            raise MoexpError(f"decay {self.decay}", valid="above 0, up to 1")


def train_eagle(
    head: EagleHead,
    model: PreTrainedModel,
    corpus_NL: Tensor,
    settings: HeadSettings,
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    on_step: OnStep = lambda step, metrics: None,
) -> int:
    """Trains a head (fp32) in place against the frozen target; returns the updates made. Resumes exactly.

    Metrics of a step: `loss`, `kl` (mean over steps), and for each draft step s from 1 `acceptance_s` (share of
    positions where the head's most likely token is the target's) and `overlap_s` (sum of min(p, q)).
    """
    target = TargetPass(model, head.feature_layers)

    def step_fn(step: int) -> Metrics:
        rows = own_rows(len(corpus_NL), settings.rows, step, settings.seed)
        rows_BL = corpus_NL[rows].long().to(model.device)
        seen = target(rows_BL)
        with head_autocast(model, settings.autocast):
            chains = Chains(head, rows_BL, seen.features_BLF)
        loss, metrics = eagle_loss(chains, rows_BL, seen, model, settings)
        loss.backward()
        return metrics

    return train_head(head, settings, step_fn, checkpoint, identity, on_step)


def train_head(
    head: EagleHead | MtpHead,
    settings: HeadSettings,
    step_fn: Callable[[int], Metrics],
    checkpoint: Path | None,
    identity: str,
    on_step: OnStep,
) -> int:
    """The training loop over what is the head's own to learn."""
    named = head.train().trainable()
    for parameter in named.values():
        parameter.requires_grad_(True)
    return train(
        named, settings.schedule, step_fn,
        clip=settings.clip, optimizer=settings.optimizer,
        checkpoint=checkpoint, identity=identity, on_step=on_step,
    )  # fmt: skip


def head_autocast(model: PreTrainedModel, enabled: bool) -> torch.autocast:
    """bf16 for the head's products, on the target's device."""
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=enabled)


def eagle_loss(
    chains: Chains, rows_BL: Tensor, seen: Seen, model: PreTrainedModel, settings: HeadSettings
) -> tuple[Tensor, Metrics]:
    """The training-time test of chains that stand at step 0: loss over all steps, and metrics.

    Raises:
        MoexpError: rows that are too short for so many steps.
    """
    head = chains.head
    assert isinstance(head, EagleHead)
    batch, length = rows_BL.shape
    if length <= settings.steps + 1:
        raise MoexpError(f"rows of {length} tokens for {settings.steps} draft steps", valid=f"{settings.steps + 2} up")
    teacher = teacher_of(head, model, seen)
    flat_BL = torch.arange(batch * length, device=rows_BL.device).view(batch, length)
    loss = torch.zeros((), device=rows_BL.device)
    metrics: Metrics = {}
    kl = 0.0
    walk = chains.fork()
    for step in range(settings.steps):
        if step:
            with head_autocast(model, settings.autocast):
                walk.extend(tokens_at_step(rows_BL, step))
        live = length - 1 - step  # roots whose next token is still inside the row
        with head_autocast(model, settings.autocast):
            states_TH = head.norm(walk.hidden[:, :live]).flatten(0, 1)
        wanted = teacher.rows(flat_BL[:, step + 1 : step + 1 + live].flatten())
        result = head_loss(states_TH, head.lm_head.weight, wanted, dtype=_product_dtype(model, settings))
        inside = max(1, ranks.mean(result.inside))
        loss = loss + settings.decay**step * result.loss / inside
        kl += result.kl / inside / settings.steps
        metrics[f"acceptance_{step + 1}"] = result.match / result.tokens
        metrics[f"overlap_{step + 1}"] = result.overlap / result.tokens
    return loss, {"loss": float(loss.detach()), "kl": kl, **metrics}


def teacher_of(head: EagleHead, model: PreTrainedModel, seen: Seen) -> Teacher:
    """The target's distributions at all positions of the rows, flat over rows and positions."""
    lm_head = model.get_output_embeddings()
    target_ids_D = head.target_ids(torch.arange(head.config.draft_vocab, device=seen.final_BLH.device))
    draft_ids_V = head.draft_ids(torch.arange(head.vocab, device=seen.final_BLH.device))
    return read_teacher(seen.final_BLH.flatten(0, 1), lm_head.weight.detach(), target_ids_D, draft_ids_V)


def _product_dtype(model: PreTrainedModel, settings: HeadSettings) -> torch.dtype:
    return torch.bfloat16 if settings.autocast else torch.float32


@torch.no_grad()
def measure_eagle(
    head: EagleHead, model: PreTrainedModel, rows_NL: Tensor, *, steps: int = 3, batch: int = 8
) -> Metrics:
    """The metrics of `train_eagle` on held-out rows, without training; means weighted by rows."""
    target = TargetPass(model, head.feature_layers)
    settings = HeadSettings(Schedule(0, 0.0), steps=steps, decay=1.0, autocast=head.fc.weight.dtype != torch.float32)
    sums: Metrics = {}
    for rows_BL in rows_NL.long().to(model.device).split(batch):
        seen = target(rows_BL)
        with head_autocast(model, settings.autocast):
            chains = Chains(head, rows_BL, seen.features_BLF)
        _, metrics = eagle_loss(chains, rows_BL, seen, model, settings)
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value * len(rows_BL) / len(rows_NL)
    return sums
