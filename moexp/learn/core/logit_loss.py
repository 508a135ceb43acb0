"""The distillation loss on logits, without ever storing a [T, V] tensor of them.

The head is frozen, so the gradient for the student's hidden state has a closed form: for a temperature t, d/dz of
t^2 KL(p || q) is t (q - p), and of cross-entropy q - onehot. Forward computes it by chunks in fp32; backward scales it.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128  # tokens whose logits exist at once: 25 MB in fp32 at a vocabulary of 49k


@dataclass
class LogitLoss:
    """Sums over `tokens`; `loss` carries the gradient."""

    loss: Tensor
    kl: float  # KL(target || draft) in nats, at temperature 1
    nll: float  # the student's cross-entropy against the teacher's argmax
    agree: int  # equal argmaxes
    tokens: int


class _FusedLogitLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TH: Tensor,
        teacher_TH: Tensor,
        student_head_VH: Tensor,
        teacher_head_VH: Tensor,
        kl_weight: float,
        token_weight: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        gradient_TH = torch.empty_like(student_TH)
        loss = torch.zeros((), dtype=torch.float32, device=student_TH.device)
        sums = torch.zeros(3, dtype=torch.float64, device=student_TH.device)
        for start in range(0, student_TH.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            student_CV = F.linear(student_TH[part], student_head_VH).float()
            teacher_CV = F.linear(teacher_TH[part], teacher_head_VH).float()
            q_CV, log_z_student_C, guess_C = _softmax(student_CV)
            p_CV, log_z_teacher_C, target_C = _softmax(teacher_CV)
            row_C = torch.arange(len(target_C), device=target_C.device)
            nll = (log_z_student_C - student_CV[row_C, target_C]).sum()
            # sum p (log p - log q) = sum p (t - s) - log Z_t + log Z_s
            gap_C = torch.einsum("cv,cv->c", p_CV, teacher_CV - student_CV)
            kl = (gap_C - log_z_teacher_C + log_z_student_C).sum()
            sums += torch.stack([kl, nll, (guess_C == target_C).sum().float()]).double()
            if temperature == 1.0:
                step_CV = p_CV.neg_().add_(q_CV).mul_(kl_weight)
                loss += kl_weight * kl
            else:
                soft_p_CV = F.log_softmax(teacher_CV / temperature, dim=-1)
                soft_q_CV = F.log_softmax(student_CV / temperature, dim=-1)
                loss += kl_weight * temperature**2 * (soft_p_CV.exp() * (soft_p_CV - soft_q_CV)).sum()
                step_CV = kl_weight * temperature * (soft_q_CV.exp() - soft_p_CV.exp())
            if token_weight:
                loss += token_weight * nll
                step_CV += token_weight * q_CV
                step_CV[row_C, target_C] -= token_weight
            gradient_TH[part] = (step_CV.to(student_head_VH.dtype) @ student_head_VH).to(gradient_TH.dtype)
        ctx.save_for_backward(gradient_TH)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TH,) = ctx.saved_tensors
        return gradient_TH * grads[0], None, None, None, None, None, None


def _softmax(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [C, V], log of the normaliser [C] and argmax [C] (the lowest index on ties)."""
    p_CV = logits_CV.softmax(-1)
    best_C = logits_CV.argmax(-1)
    row_C = torch.arange(len(best_C), device=best_C.device)
    return p_CV, logits_CV[row_C, best_C] - p_CV[row_C, best_C].log(), best_C


def logit_loss(
    student_TH: Tensor,
    teacher_TH: Tensor,
    student_head_VH: Tensor,
    teacher_head_VH: Tensor,
    *,
    kl_weight: float = 1.0,
    token_weight: float = 0.0,
    temperature: float = 1.0,
) -> LogitLoss:
    """KL from the teacher and cross-entropy against its argmax, summed over tokens; differentiable in `student_TH`.

    Hidden states are final ones, after the last norm; the frozen heads have their dtype. `temperature` softens both
    distributions in the KL term, which is scaled by its square.

    Paper: DraftExpert eq. 8; DraftExpert eq. 9.
    """
    loss, sums = _FusedLogitLoss.apply(
        student_TH, teacher_TH, student_head_VH, teacher_head_VH, kl_weight, token_weight, temperature
    )
    kl, nll, agree = sums.tolist()
    return LogitLoss(loss=loss, kl=kl, nll=nll, agree=int(agree), tokens=student_TH.shape[0])
