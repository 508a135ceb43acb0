"""Batched measurements of a draft path: agreement, KL, router agreement, and acceptance on held-out contexts.

These run the same definitions as the decoding runtime (DESIGN: `agreement`, `acceptance_ctx`), many contexts at a
time, with experts in memory.

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
        path.predicted = {}
        with path.drafting():
            draft_TH = path.model.model(input_ids=rows_BL, use_cache=False).last_hidden_state.flatten(0, 1)
        result = logit_loss(draft_TH, target_TH, head_VH, head_VH)
        shares = []
        for layer, predicted_Tk in path.predicted.items():
            chosen_Tk = _chosen(path, layer, teacher[layer].router_logits_TE)
            shares.append(_overlap(predicted_Tk, chosen_Tk, path.spec.num_experts))
        path.predicted = None
        kl, agree, tokens = kl + result.kl, agree + result.agree, tokens + result.tokens
        overlap += sum(shares) / len(shares) / k * result.tokens
    return Agreement(agree / tokens, kl / tokens, overlap / tokens, tokens)


@torch.no_grad()
def held_contexts(path: DraftPath, rows_NL: Tensor, starts: list[int]) -> DynamicCache:
    """The target's keys and values of the rows, as far as `measure_acceptance` needs them; all drafters share them."""
    cache = DynamicCache(config=path.model.config)
    path.model.model(input_ids=rows_NL[:, : max(starts) - 1].long().to(path.model.device), cache=cache)
    return cache


@torch.no_grad()
def measure_acceptance(
    path: DraftPath, rows_NL: Tensor, starts: list[int], draft_length: int = 4, contexts: DynamicCache | None = None
) -> Acceptance:
    """Greedy acceptance from held-out contexts.

    At every position in `starts` (2 and up), the target's KV holds the context before it, the draft path proposes K
    tokens (its own KV inside the block), and the target verifies them; a draft counts as accepted while it equals the
    target's argmax.

    Args:
        contexts: of these rows and starts, if they are at hand.
    """
    model = path.model
    accepted_NK: list[Tensor] = []
    unions_draft: list[Tensor] = []
    unions_verify: list[Tensor] = []
    whole = contexts or held_contexts(path, rows_NL, starts)
    for start in starts:
        last_N1 = rows_NL[:, start - 1 : start].long().to(model.device)
        fed, drafts = last_N1, []
        cache = _first_positions(whole, start - 1)
        shape = (len(fed), len(path.spec.moe_layers), path.spec.num_experts)
        union_draft = torch.zeros(shape, dtype=torch.bool, device=model.device)
        for _ in range(draft_length):
            path.predicted = {}
            with path.drafting():
                logits_NV = model(input_ids=fed, cache=cache).logits[:, -1]
            for place, index_Nk in enumerate(path.predicted.values()):
                union_draft[:, place].scatter_(1, index_Nk[:, : path.top_r], True)
            fed = logits_NV.argmax(-1, keepdim=True)
            drafts.append(fed)
        path.predicted = None
        block_NB = torch.cat([last_N1, *drafts], dim=1)
        with path.recording("routing") as teacher:
            wanted_NB = model(input_ids=block_NB, cache=_first_positions(whole, start - 1)).logits.argmax(-1)
        right_NK = (wanted_NB[:, :-1] == block_NB[:, 1:]).long().cumprod(dim=1)
        accepted_NK.append(right_NK)
        union_verify = torch.zeros_like(union_draft)
        for place, layer in enumerate(path.spec.moe_layers):
            chosen_Tk = _chosen(path, layer, teacher[layer].router_logits_TE)
            union_verify[:, place].scatter_(1, chosen_Tk.view(len(fed), -1), True)
        unions_draft.append(union_draft.sum((1, 2)))
        unions_verify.append(union_verify.sum((1, 2)))
    accepted_SNK = torch.stack(accepted_NK).float()
    return Acceptance(
        acceptance=float(accepted_SNK.mean()),
        by_position=tuple(accepted_SNK.mean((0, 1)).tolist()),
        per_row=tuple(accepted_SNK.mean((0, 2)).tolist()),
        blocks=accepted_SNK.shape[0] * accepted_SNK.shape[1],
        unique_draft=float(torch.stack(unions_draft).float().mean()),
        unique_verify=float(torch.stack(unions_verify).float().mean()),
    )


def _first_positions(cache: DynamicCache, length: int) -> DynamicCache:
    """A cache of the first `length` positions of another, which it leaves as it is. Nothing is copied."""
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    part.crop(length - cache.get_seq_length())
    return part


def _chosen(path: DraftPath, layer: int, router_logits_TE: Tensor) -> Tensor:
    """The target's top-k [T, k] from its router logits (the router's own selection, bias included)."""
    gate = getattr(path.model.model.layers[layer].mlp, path.family.router)
    scores_TE = router_logits_TE.float()
    if path.scoring == "sigmoid":
        scores_TE = scores_TE.sigmoid() + gate.e_score_correction_bias
    return scores_TE.topk(path.spec.top_k, dim=-1).indices


def _overlap(a_Tk: Tensor, b_Tk: Tensor, experts: int) -> float:
    """Mean size of the intersection of two sets of expert ids a token."""
    one_TE = torch.zeros(a_Tk.shape[0], experts, dtype=torch.bool, device=a_Tk.device).scatter_(1, a_Tk, True)
    two_TE = torch.zeros(b_Tk.shape[0], experts, dtype=torch.bool, device=b_Tk.device).scatter_(1, b_Tk, True)
    return float((one_TE & two_TE).sum(-1).float().mean())
