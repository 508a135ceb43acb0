"""Self-distillation of draft experts (DraftExpert, equations 6 to 11), online: nothing but token ids is stored.

Stage one fits each draft expert to its layer's residual, stage two trains end to end. With `context="teacher-kv"` a
position attends as when decoding: to the target's keys and values before its block, to the draft path's own inside.

Shapes: B rows, L tokens a row, T = B x L, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from moexp.learn.core.loop import UNSAVED, Metrics, Run, Schedule, own_rows, train
from moexp.learn.core.optimizers import OptimizerName, Updates
from moexp.learn.draft_expert.losses import Weights, draft_expert_loss
from moexp.learn.draft_expert.path import DraftPath


@dataclass(frozen=True)
class DistillSettings:
    """Both stages; `rows` is the batch in corpus rows, `block` the longest block of a teacher-kv pass.

    `optimizer` is stage two's: in stage one AdamW learns more (relative residual 0.63, Muon 0.75, after 20 steps).
    """

    warmup: Schedule
    main: Schedule
    weights: Weights = Weights()
    context: Literal["teacher-forcing", "teacher-kv"] = "teacher-kv"
    rows: int = 8
    warmup_rows: int = 8
    block: int = 5
    seed: int = 0
    optimizer: OptimizerName = "muon"


def warm_up(path: DraftPath, corpus_NL: Tensor, settings: DistillSettings, run: Run = UNSAVED) -> None:
    """Stage one, in place: each draft expert (fp32) against the residual, on the target's own hidden states.

    Paper: DraftExpert eq. 7.
    """

    def step_fn(step: int) -> Metrics:
        rows_BL = own_rows(corpus_NL, settings.warmup_rows, step, settings.seed).long().to(path.model.device)
        with torch.no_grad(), path.warming_up() as errors:
            path.model.model(input_ids=rows_BL, use_cache=False)
        return {"residual": sum(errors) / len(errors)}

    _train(path, settings.warmup, step_fn, Updates(clip=100.0), run)


def distill(path: DraftPath, corpus_NL: Tensor, settings: DistillSettings, run: Run = UNSAVED) -> None:
    """Stage two, in place: all losses end to end on the draft path; the target stays frozen.

    Paper: DraftExpert eq. 11.
    """
    model, weights = path.model, settings.weights
    head_VH = model.lm_head.weight.detach()

    def step_fn(step: int) -> Metrics:
        rows_BL = own_rows(corpus_NL, settings.rows, step, settings.seed + 1).long().to(model.device)
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), path.recording("all" if weights.residual else "routing"):
            target_TH = model.model(input_ids=rows_BL, cache=cache, use_cache=True).last_hidden_state.flatten(0, 1)
        with path.drafting(losses=True) as sums, torch.autocast(model.device.type, dtype=torch.bfloat16):
            if settings.context == "teacher-kv":
                length = rows_BL.shape[1]
                offset = int(torch.randint(settings.block, (), generator=torch.Generator().manual_seed(step)))
                draft = model.model(
                    input_ids=rows_BL,
                    cache=cache,
                    attention_mask=teacher_kv_mask(length, settings.block, offset).to(model.device),
                    position_ids=torch.arange(length, device=model.device)[None],
                )
            else:
                draft = model.model(input_ids=rows_BL, use_cache=False)
        draft_TH = draft.last_hidden_state.flatten(0, 1)
        loss, metrics = draft_expert_loss(draft_TH, target_TH, head_VH, sums, len(path.spec.moe_layers), weights)
        loss.backward()
        return metrics

    _train(path, settings.main, step_fn, Updates(settings.optimizer), run)


def _train(path: DraftPath, schedule: Schedule, step_fn: Callable[[int], Metrics], updates: Updates, run: Run) -> None:
    assert path.experts is not None
    path.model.requires_grad_(False)
    train(dict(path.experts.named_parameters()), schedule, step_fn, updates, run)


def teacher_kv_mask(length: int, block: int, offset: int) -> Tensor:
    """Who sees whom when drafting, bool [1, 1, L, 2L]: target keys before the block, then draft keys of it so far.

    Blocks of `block` positions start at -offset, so a random offset gives each position each index in a block.
    """
    position_L = torch.arange(length)
    block_L = (position_L + offset) // block
    before_LL = block_L[None, :] < block_L[:, None]
    inside_LL = (block_L[None, :] == block_L[:, None]) & (position_L[None, :] <= position_L[:, None])
    return torch.cat([before_LL, inside_LL], dim=1)[None, None]
