"""The loss of EAGLE-3 and MTP heads over several draft steps (training-time test, arXiv 2503.01840).

The sum over steps s of decay^s times the step's mean loss: of an EAGLE-3 head `loss.py`'s cross-entropy; of an MTP head
(DeepSeek-V3) KL(target || head) plus cross-entropy against the target's most likely token.

Shape suffixes: B rows, L tokens a row, T positions, R roots, H, V, D as in `moexp.target.heads.head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moexp.base import ranks
from moexp.base.errors import MoexpError
from moexp.learn.core.logit_loss import LogitLoss, logit_loss
from moexp.learn.core.loop import Metrics, Schedule
from moexp.learn.core.optimizers import OptimizerName
from moexp.learn.heads.chains import Chains, Seen, tokens_at_step
from moexp.learn.heads.loss import HeadLoss, head_loss, read_teacher
from moexp.target.heads.eagle_head import EagleHead
from moexp.target.heads.mtp_head import MtpHead

StepLoss = Callable[[Tensor, slice], tuple[HeadLoss | LogitLoss, float]]
"""(states [B, R, H], positions of a row that they are taught) -> their loss, and what to divide it by."""


@dataclass(frozen=True)
class HeadSettings:
    """How a head is trained."""

    schedule: Schedule
    steps: int = 3  # draft steps of the training-time test; 1 trains on true states alone
    decay: float = 0.8  # weight of a step relative to the one before
    rows: int = 8  # corpus rows a batch
    clip: float = 0.5  # largest norm of the gradient
    seed: int = 0  # of the batches
    autocast: bool = True  # run the head in bf16 (its weights and losses stay in fp32)
    optimizer: OptimizerName = "adamw"
    token_weight: float = 0.1  # of an MTP head's cross-entropy

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise MoexpError(f"{self.steps} draft steps", valid="from 1")
        if not 0 < self.decay <= 1:
            raise MoexpError(f"decay {self.decay}", valid="above 0, up to 1")

    def precision(self, device: torch.device) -> torch.autocast:
        """Inside, the head's products are bf16 if `autocast` says so."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast)


def unrolled_loss(
    chains: Chains, rows_BL: Tensor, seen: Seen, model: PreTrainedModel, settings: HeadSettings
) -> tuple[Tensor, Metrics]:
    """The loss over all draft steps of chains at step 0, and metrics; MoexpError where rows are too short.

    Metrics: `loss`, `kl` (mean over steps), and for each draft step s from 1 `acceptance_s` (share of equal most likely
    tokens); of an EAGLE-3 head also `overlap_s` (sum of min(p, q)).
    """
    length = rows_BL.shape[1]
    if length <= settings.steps + 1:
        raise MoexpError(f"rows of {length} tokens for {settings.steps} draft steps", valid=f"{settings.steps + 2} up")
    walk = chains.fork()
    if isinstance(chains.head, EagleHead):
        step_loss = _eagle_step_loss(chains.head, model, seen, settings)
    else:
        assert isinstance(chains.head, MtpHead)
        step_loss = _mtp_step_loss(chains.head, seen, settings)
    loss = torch.zeros((), device=rows_BL.device)
    metrics: Metrics = {}
    kl = 0.0
    for step in range(settings.steps):
        if step:
            with settings.precision(rows_BL.device):
                walk.extend(tokens_at_step(rows_BL, step))
        live = length - 1 - step  # roots whose next token is still inside the row
        result, count = step_loss(walk.hidden[:, :live], slice(step + 1, step + 1 + live))
        loss = loss + settings.decay**step * result.loss / count
        kl += result.kl / count / settings.steps
        metrics[f"acceptance_{step + 1}"] = result.agree / result.tokens
        if isinstance(result, HeadLoss):
            metrics[f"overlap_{step + 1}"] = result.overlap / result.tokens
    return loss, {"loss": float(loss.detach()), "kl": kl, **metrics}


def _eagle_step_loss(head: EagleHead, model: PreTrainedModel, seen: Seen, settings: HeadSettings) -> StepLoss:
    device, (batch, length) = seen.final_BLH.device, seen.final_BLH.shape[:2]
    target_ids_D = head.target_ids(torch.arange(head.config.draft_vocab, device=device))
    draft_ids_V = head.draft_ids(torch.arange(head.vocab, device=device))
    weight_VH = model.get_output_embeddings().weight.detach()
    teacher = read_teacher(seen.final_BLH.flatten(0, 1), weight_VH, target_ids_D, draft_ids_V)
    index_BL = torch.arange(batch * length, device=device).view(batch, length)
    dtype = torch.bfloat16 if settings.autocast else torch.float32

    def step_loss(hidden_BRH: Tensor, positions: slice) -> tuple[HeadLoss, float]:
        with settings.precision(device):
            states_TH = head.norm(hidden_BRH).flatten(0, 1)
        result = head_loss(states_TH, head.lm_head.weight, teacher.rows(index_BL[:, positions].flatten()), dtype=dtype)
        return result, max(1, ranks.mean(result.inside))

    return step_loss


def _mtp_step_loss(head: MtpHead, seen: Seen, settings: HeadSettings) -> StepLoss:
    head_VH = head.shared.lm_head.weight.detach()

    def step_loss(hidden_BRH: Tensor, positions: slice) -> tuple[LogitLoss, float]:
        states_TH = hidden_BRH.flatten(0, 1).to(head_VH.dtype)
        target_TH = seen.final_BLH[:, positions].flatten(0, 1)
        result = logit_loss(states_TH, target_TH, head_VH, head_VH, token_weight=settings.token_weight)
        return result, result.tokens

    return step_loss
