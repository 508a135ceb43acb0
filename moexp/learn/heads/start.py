"""Where a draft head starts: the best linear guess of the target's next state, by least squares on a few rows.

A head that passes the state on predicts the token that is already known. Here the state at t + 1 (without the last
norm's weights) is regressed on the states at t and the embedding of token t + 1. An MTP head's projection reads both;
an EAGLE-3 head gets the embedding by attention to its own position, with as many singular vectors as values have room.

Shape suffixes: T positions, F inputs, H hidden size, W dimension of an attention head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moexp.base.ridge import solve_ridge
from moexp.learn.heads.chains import TargetPass
from moexp.target.heads.eagle_head import EagleHead
from moexp.target.heads.mtp_head import MtpHead

RIDGE = 1e-2
"""Relative to the mean square of an input."""
SKIPPED = 4  # leading positions: the first of a text has states of another magnitude
SHARPNESS = 1.5  # of attention to a position's own embedding: a match scores about SHARPNESS^2 x 8
TEMPERATURES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2)


@torch.no_grad()
def start_by_least_squares(head: EagleHead | MtpHead, model: PreTrainedModel, rows_NL: Tensor, batch: int = 8) -> float:
    """Sets a head (fp32, as `start_from_target` leaves it), in place, to its best linear guess; scales its last norm.

    Of `TEMPERATURES`, the norm's weights take the factor of least cross-entropy against the target's most likely
    tokens; returns that, in nats a token.
    """
    target = TargetPass(model, head.feature_layers)
    base: Any = model.model
    norm_H = base.norm.weight.float()
    gram_FF, cross_FH = torch.zeros((), device=model.device), torch.zeros((), device=model.device)
    for rows_BL in rows_NL.long().to(model.device).split(batch):
        seen = target(rows_BL)
        inputs_TF = _inputs(head, rows_BL, seen.features_BLF)
        next_TH = seen.final_BLH[:, SKIPPED + 1 :].flatten(0, 1)
        gram_FF = inputs_TF.T @ inputs_TF + gram_FF
        cross_FH = inputs_TF.T @ (next_TH.float() / norm_H) + cross_FH
    solved_FH = solve_ridge(gram_FF, cross_FH, RIDGE)
    if isinstance(head, EagleHead):
        states = 3 * head.config.target_hidden
        head.fc.weight.copy_(solved_FH[:states].T)
        _carry_embedding(head, solved_FH[states:])
        norm: Any = head.norm
    else:
        head.eh_proj.weight.copy_(solved_FH.T)
        norm = head.shared_head["norm"]
    # The last batch is enough for one number.
    guessed_TH = torch.nn.functional.rms_norm(inputs_TF @ solved_FH, norm_H.shape)
    best_T = model.get_output_embeddings()(next_TH).argmax(-1)
    losses = {factor: _loss(head, guessed_TH * norm_H * factor, best_T) for factor in TEMPERATURES}
    factor = min(losses, key=lambda name: losses[name])
    norm.weight.mul_(factor)
    return losses[factor]


def _loss(head: EagleHead | MtpHead, states_TH: Tensor, best_T: Tensor) -> float:
    weight: Tensor = head.lm_head.weight if isinstance(head, EagleHead) else head.shared.lm_head.weight
    ids_T = head.draft_ids(best_T)
    logits = states_TH[ids_T >= 0].to(torch.bfloat16) @ weight.to(torch.bfloat16).T
    return float(torch.nn.functional.cross_entropy(logits.float(), ids_T[ids_T >= 0]))


def _inputs(head: EagleHead | MtpHead, rows_BL: Tensor, features_BLF: Tensor) -> Tensor:
    """What the head guesses from [T, F], at the positions that have a next one."""
    states_BTF = features_BLF[:, SKIPPED:-1].float()
    embedded_BTH = head.shared.embed(rows_BL[:, SKIPPED + 1 :]).float()
    if isinstance(head, EagleHead):
        parts = [states_BTF, head.midlayer.input_layernorm(embedded_BTH)]
    else:
        parts = [head.enorm(embedded_BTH), head.hnorm(states_BTF)]
    return torch.cat(parts, dim=-1).flatten(0, 1)


def _carry_embedding(head: EagleHead, wanted_HH: Tensor) -> None:
    """Lets the attention add x W: x the normalised embedding at its own position, W nearest to `wanted_HH` in rank."""
    config, attention = head.config, head.midlayer.self_attn
    hidden, width = config.hidden, attention.width
    group = config.num_heads // config.num_kv_heads
    left_HR, scale_R, right_RH = torch.linalg.svd(wanted_HH, full_matrices=False)
    room = min(config.num_kv_heads * width, len(scale_R))
    attention.v_proj.weight.zero_()
    attention.o_proj.weight.zero_()
    generator = torch.Generator().manual_seed(0)
    for number in range(config.num_kv_heads):
        keys, query = slice(number * width, (number + 1) * width), number * group * width
        ranks = slice(keys.start, min(keys.stop, room))
        used = max(0, ranks.stop - ranks.start)
        root_R = scale_R[ranks].sqrt()
        attention.v_proj.weight[keys.start : keys.start + used, :hidden] = (left_HR[:, ranks] * root_R).T
        attention.o_proj.weight[:, query : query + used] = right_RH[ranks].T * root_R
        # Keys and queries are the same projection of the embedding: a position matches itself far above others.
        same_HW = torch.linalg.qr(torch.randn(hidden, width, generator=generator)).Q * SHARPNESS
        for projection, rows in ((attention.k_proj, keys), (attention.q_proj, slice(query, query + width))):
            projection.weight[rows] = 0.0
            projection.weight[rows, :hidden] = same_HW.T.to(wanted_HH.device)
