"""The loss of a head with its own projection to a reduced vocabulary, without [T, D] tensors in autograd.

The loss is cross-entropy H(p', q) against the target's distribution renormalised on the draft vocabulary, at positions
whose most likely token can be drafted. Its gradient has a closed form, dH/dz = q - p'. Arithmetic is fp32.

Shape suffixes: T positions, C positions of a chunk, H width of the head, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128


@dataclass(frozen=True)
class Teacher:
    """The target's next-token distributions, as a head with a draft vocabulary needs them."""

    logits_TD: Tensor  # of the tokens that can be drafted
    log_z_T: Tensor  # log of the normaliser over the full vocabulary
    best_T: Tensor  # draft id of the most likely token, -1 where it cannot be drafted

    def rows(self, index: Tensor) -> Teacher:
        """These positions."""
        return Teacher(self.logits_TD[index], self.log_z_T[index], self.best_T[index])


@torch.no_grad()
def read_teacher(final_TH: Tensor, head_VH: Tensor, target_ids_D: Tensor, draft_ids_V: Tensor) -> Teacher:
    """The target's distributions from its final states and its output projection."""
    is_full = len(target_ids_D) == len(draft_ids_V)
    logits, log_z, best = [], [], []
    for part_CH in final_TH.split(CHUNK):
        logits_CV = F.linear(part_CH, head_VH).float()
        log_z.append(logits_CV.logsumexp(-1))
        best.append(draft_ids_V[logits_CV.argmax(-1)])
        logits.append(logits_CV if is_full else logits_CV[:, target_ids_D])
    return Teacher(torch.cat(logits), torch.cat(log_z), torch.cat(best))


@dataclass
class HeadLoss:
    """Sums over positions; `loss` (cross-entropy) carries the gradient."""

    loss: Tensor
    kl: float  # KL(p' || q) over the `inside` positions
    agree: int  # equal most likely tokens, over all `tokens`
    overlap: float  # sum over all `tokens` of min(p, q) with the target's true p: acceptance at temperature 1
    inside: int  # positions whose best token can be drafted
    tokens: int


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_DH: Tensor, teacher: Teacher, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        grad_TH = torch.zeros_like(hidden_TH)
        grad_DH = torch.zeros_like(weight_DH)
        low_TH, low_DH = hidden_TH.to(dtype), weight_DH.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
        sums = torch.zeros(3, dtype=torch.float64, device=hidden_TH.device)
        for start in range(0, len(hidden_TH), CHUNK):
            part = slice(start, start + CHUNK)
            log_q_CD = F.linear(low_TH[part], low_DH).float().log_softmax(-1)
            wanted_CD, best_C = teacher.logits_TD[part], teacher.best_T[part]
            log_p_CD = wanted_CD.log_softmax(-1)
            inside_C = best_C >= 0
            p_CD, q_CD = log_p_CD.exp(), log_q_CD.exp()
            cross_C = -(p_CD * log_q_CD).sum(-1)
            entropy_C = -(p_CD * log_p_CD).sum(-1)
            loss += cross_C[inside_C].sum()
            sums += torch.stack(
                [
                    (cross_C - entropy_C)[inside_C].sum(),
                    (log_q_CD.argmax(-1) == best_C).sum().float(),
                    torch.minimum((wanted_CD - teacher.log_z_T[part, None]).exp(), q_CD).sum(),
                ]
            ).double()
            slope_CD = ((q_CD - p_CD) * inside_C[:, None]).to(dtype)
            grad_TH[part] = (slope_CD @ low_DH).to(grad_TH.dtype)
            grad_DH += (slope_CD.T @ low_TH[part]).to(grad_DH.dtype)
        ctx.save_for_backward(grad_TH, grad_DH)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TH, grad_DH = ctx.saved_tensors
        return grad_TH * grads[0], grad_DH * grads[0], None, None


def head_loss(hidden_TH: Tensor, weight_DH: Tensor, teacher: Teacher, *, dtype: torch.dtype) -> HeadLoss:
    """Cross-entropy against the target, summed over positions, differentiable in hidden states and projection.

    `hidden_TH` is after the final norm; matrix products are in `dtype`.
    """
    loss, sums = _FusedHeadLoss.apply(hidden_TH, weight_DH, teacher, dtype)
    kl, agree, overlap = sums.tolist()
    inside = int((teacher.best_T >= 0).sum())
    return HeadLoss(loss, kl, int(agree), overlap, inside, len(hidden_TH))
