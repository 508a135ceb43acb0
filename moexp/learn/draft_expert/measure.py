"""Batched measurements of a draft path, with the definitions of the runtime: agreement, KL, acceptance in contexts.

Shapes: N rows, L tokens a row, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from moexp.learn.core.logit_loss import logit_loss
from moexp.learn.draft_expert.path import DraftPath


@dataclass(frozen=True)
class Agreement:
    """Teacher-forced: share of equal argmaxes, KL(target || draft) in nats, mean top-k overlap of routing."""

    agreement: float
    kl: float
    router_agreement: float
    tokens: int


@dataclass(frozen=True)
class Acceptance:
    """Blocks of K greedy drafts from held-out contexts: accepted / drafted, and the share accepted at each position."""

    acceptance: float
    by_position: tuple[float, ...]
    per_row: tuple[float, ...]
    blocks: int
    unique_draft: float
    unique_verify: float


@torch.no_grad()
def measure_agreement(path: DraftPath, rows_NL: Tensor, batch: int = 8) -> Agreement:
    """Plain teacher forcing over token rows: every position drafts once, on the draft path's own prefix."""
    head_VH = path.model.lm_head.weight
    k = path.spec.top_k
    tokens = agree = 0
    kl = overlap = 0.0
    for rows_BL in rows_NL.long().to(path.model.device).split(batch):
        with path.recording("routing") as teacher:
            target_TH = path.model.model(input_ids=rows_BL, use_cache=False).last_hidden_state.flatten(0, 1)
        with path.drafting():
            draft_TH = path.model.model(input_ids=rows_BL, use_cache=False).last_hidden_state.flatten(0, 1)
        result = logit_loss(draft_TH, target_TH, head_VH, head_VH)
        shares = [_overlap(path.predicted[layer], routing.index_Tk) for layer, routing in teacher.items()]
        kl, agree, tokens = kl + result.kl, agree + result.agree, tokens + result.tokens
        overlap += sum(shares) / len(shares) / k * result.tokens
    return Agreement(agree / tokens, kl / tokens, overlap / tokens, tokens)


@torch.no_grad()
def held_contexts(path: DraftPath, rows_NL: Tensor, starts: list[int]) -> DynamicCache:
    """The target's keys and values of the rows, as `measure_acceptance` takes them; all drafters share them."""
    cache = DynamicCache(config=path.model.config)
    path.model.model(input_ids=rows_NL[:, : max(starts) - 1].long().to(path.model.device), cache=cache)
    return cache


@torch.no_grad()
def measure_acceptance(
    path: DraftPath, rows_NL: Tensor, starts: list[int], draft_length: int = 4, contexts: DynamicCache | None = None
) -> Acceptance:
    """Greedy acceptance from held-out contexts, one block at each position in `starts` (2 and up).

    The target's KV holds the context before, the draft path proposes K tokens, and a draft is accepted while it equals
    the target's argmax. `contexts` are those of these rows and starts, if they were computed before.
    """
    model, layers, experts = path.model, path.spec.moe_layers, path.spec.num_experts
    accepted_NK: list[Tensor] = []
    unique_draft: list[Tensor] = []
    unique_verify: list[Tensor] = []
    contexts = contexts or held_contexts(path, rows_NL, starts)
    for start in starts:
        block, used = [rows_NL[:, start - 1 : start].long().to(model.device)], []
        cache = _first_positions(contexts, start - 1)
        for _ in range(draft_length):
            with path.drafting():
                logits_NV = model(input_ids=block[-1], cache=cache).logits[:, -1]
            used.append(torch.stack([path.predicted[layer][:, : path.top_r] for layer in layers], dim=1))
            block.append(logits_NV.argmax(-1, keepdim=True))
        block_NB = torch.cat(block, dim=1)
        with path.recording("routing") as teacher:
            target_NB = model(input_ids=block_NB, cache=_first_positions(contexts, start - 1)).logits.argmax(-1)
        accepted_NK.append((target_NB[:, :-1] == block_NB[:, 1:]).long().cumprod(dim=1))
        unique_draft.append(_union_sizes(torch.cat(used, dim=2), experts))
        routed = [teacher[layer].index_Tk.view(len(block_NB), -1) for layer in layers]
        unique_verify.append(_union_sizes(torch.stack(routed, dim=1), experts))
    accepted_SNK = torch.stack(accepted_NK).float()
    return Acceptance(
        acceptance=float(accepted_SNK.mean()),
        by_position=tuple(accepted_SNK.mean((0, 1)).tolist()),
        per_row=tuple(accepted_SNK.mean((0, 2)).tolist()),
        blocks=accepted_SNK.shape[0] * accepted_SNK.shape[1],
        unique_draft=float(torch.stack(unique_draft).float().mean()),
        unique_verify=float(torch.stack(unique_verify).float().mean()),
    )


def _union_sizes(ids_NLm: Tensor, experts: int) -> Tensor:
    """Distinct layer-experts [N] among the ids of each row."""
    used_NLE = torch.zeros(*ids_NLm.shape[:2], experts, dtype=torch.bool, device=ids_NLm.device)
    return used_NLE.scatter_(2, ids_NLm, True).sum((1, 2))


def _first_positions(cache: DynamicCache, length: int) -> DynamicCache:
    """The first `length` positions of a cache, which stays as it is; nothing is copied."""
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    part.crop(length - cache.get_seq_length())
    return part


def _overlap(a_Tk: Tensor, b_Tk: Tensor) -> float:
    """Mean size of the intersection of two sets of expert ids a token."""
    return float((a_Tk[:, :, None] == b_Tk[:, None, :]).sum((1, 2)).float().mean())
