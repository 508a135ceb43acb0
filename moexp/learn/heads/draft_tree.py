"""Draft trees from all roots of a batch at once, and their worth under the target.

As in decoding, the children of all nodes of a level compete, and the `width` of most path probability stay. The root,
a known token, is no node.

Shape suffixes: B rows, L tokens a row, n true pairs, R roots a row, W width, N = W x depth nodes, T nodes of a target
step, K keys it sees, H hidden size, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moexp.learn.heads.chains import Chains, Seen, pairs_up_to
from moexp.learn.heads.loss import CHUNK


@dataclass(frozen=True)
class Trees:
    """One tree for each root of each row; nodes are in order of levels, `width` a level."""

    tokens_BRN: Tensor  # target ids
    parents_BRN: Tensor  # index of the parent, -1 for the root
    ancestors_BRNN: Tensor  # bool, [.., i, j] where j is on the path to i or is i
    scores_BRN: Tensor  # log of the path's probability under the head
    depths_N: Tensor  # level of a node, from 1

    def with_roots_from(self, other: Trees) -> Trees:
        """The trees of both, side by side along R."""
        names = ("tokens_BRN", "parents_BRN", "ancestors_BRNN", "scores_BRN")
        return replace(self, **{name: torch.cat([getattr(self, name), getattr(other, name)], dim=1) for name in names})


@torch.no_grad()
def grow_trees(chains: Chains, *, depth: int, width: int) -> Trees:
    """Drafts a tree from every root of chains at step 0; a node proposes `width` children, `width` stay a level."""
    head, cache = chains.head, chains.cache.fork()
    out_BRPH = fed_BRPH = chains.hidden[:, :, None]  # P parents: the root, then the nodes of the level before
    batch, roots = out_BRPH.shape[:2]
    own_WW = torch.eye(width, dtype=torch.bool, device=out_BRPH.device).expand(batch, roots, width, width)
    score_BRP = torch.zeros(batch, roots, 1, device=out_BRPH.device)
    above_BRPN = own_WW[:, :, :1, :0]
    tokens, parents, scores, above = (list[Tensor]() for _ in range(4))
    for level in range(depth):
        if level:
            out_BTH = head(
                tokens[-1].flatten(1),
                fed_BRPH.flatten(1, 2),
                (chains.roots + level).repeat_interleave(width)[None],
                _node_mask(chains.roots, chains.pairs, above_BRPN, width),
                cache,
            )
            out_BRPH = out_BTH.view(batch, roots, width, -1)
        child_BRPC, draft_BRPC = head.logits(out_BRPH).log_softmax(-1).topk(width, dim=-1)
        score_BRP, best_BRW = (score_BRP[..., None] + child_BRPC).flatten(2).topk(width, dim=-1)
        parent_BRW1 = (best_BRW // width)[..., None]
        fed_BRPH = out_BRPH.gather(2, parent_BRW1.expand(-1, -1, -1, out_BRPH.shape[-1]))
        inherited = above_BRPN.gather(2, parent_BRW1.expand(-1, -1, -1, above_BRPN.shape[-1]))
        above_BRPN = torch.cat([inherited, own_WW], dim=-1)
        tokens.append(head.target_ids(draft_BRPC.flatten(2).gather(2, best_BRW)))
        parents.append(parent_BRW1[..., 0] + (level - 1) * width if level else torch.full_like(best_BRW, -1))
        scores.append(score_BRP)
        above.append(F.pad(above_BRPN, (0, (depth - 1 - level) * width)))
    return Trees(
        tokens_BRN=torch.cat(tokens, dim=2),
        parents_BRN=torch.cat(parents, dim=2),
        ancestors_BRNN=torch.cat(above, dim=2),
        scores_BRN=torch.cat(scores, dim=2),
        depths_N=torch.arange(1, depth + 1, device=own_WW.device).repeat_interleave(width),
    )


def _node_mask(roots_R: Tensor, pairs: int, above_BRWN: Tensor, width: int) -> Tensor:
    """Bool [B, R W, n + levels R W]: true pairs up to the root, then of each level the ancestors in the own tree."""
    batch, roots, _, nodes = above_BRWN.shape
    true_BTn = pairs_up_to(roots_R, pairs).repeat_interleave(width, dim=0)[None].expand(batch, -1, -1)
    same_RR = torch.eye(roots, dtype=torch.bool, device=roots_R.device)
    # [B, R, W, level, R', W']: the cache holds level after level, in each root after root.
    by_level = above_BRWN.view(batch, roots, width, nodes // width, 1, width)
    own = by_level & same_RR.view(1, roots, 1, 1, roots, 1)
    return torch.cat([true_BTn, own.reshape(batch, roots * width, -1)], dim=2)


@torch.no_grad()
def read_target(
    model: PreTrainedModel, cache: DynamicCache, seen: Seen, roots_R: Tensor, trees: Trees
) -> tuple[Tensor, Tensor]:
    """log p_BRN of each node given its path under the target, and whether it is the most likely token there.

    One pass over all trees behind the rows of `seen`, whose keys are in `cache`; extends `cache`.
    """
    batch, roots, nodes = trees.tokens_BRN.shape
    inner = int((trees.depths_N < trees.depths_N[-1]).sum())  # the last level has no children to be judged
    states_BRPH = seen.final_BLH[:, roots_R + 1][:, :, None]
    if inner:
        own_BRPP = trees.ancestors_BRNN[:, :, :inner, :inner]
        same_RR = torch.eye(roots, dtype=torch.bool, device=roots_R.device)
        tree_BTT = (own_BRPP[:, :, :, None] & same_RR[None, :, None, :, None]).reshape(batch, roots * inner, -1)
        known_RL = pairs_up_to(roots_R + 1, seen.final_BLH.shape[1])
        known_BTL = known_RL.repeat_interleave(inner, dim=0)[None].expand(batch, -1, -1)
        positions_RP = roots_R[:, None] + 1 + trees.depths_N[None, :inner]
        base: Any = model.model
        out_BTH = base(
            input_ids=trees.tokens_BRN[:, :, :inner].flatten(1),
            cache=cache,
            use_cache=True,
            attention_mask=torch.cat([known_BTL, tree_BTT], dim=2)[:, None],
            position_ids=positions_RP.flatten()[None],
        ).last_hidden_state
        states_BRPH = torch.cat([states_BRPH, out_BTH.view(batch, roots, inner, -1)], dim=2)
    # Row 0 of the states is the root's, row 1 + i that of node i.
    index_BRNH = (trees.parents_BRN + 1)[..., None].expand(-1, -1, -1, states_BRPH.shape[-1])
    parent_TH = states_BRPH.gather(2, index_BRNH).flatten(0, 2)
    head: Any = model.get_output_embeddings()
    log_p, hit = [], []
    for part_CH, token_C in zip(parent_TH.split(CHUNK), trees.tokens_BRN.flatten().split(CHUNK), strict=True):
        logits_CV = F.linear(part_CH, head.weight).float()
        log_p.append(logits_CV.gather(1, token_C[:, None])[:, 0] - logits_CV.logsumexp(-1))
        hit.append(logits_CV.argmax(-1) == token_C)
    return torch.cat(log_p).view(batch, roots, nodes), torch.cat(hit).view(batch, roots, nodes)


def tree_rewards(trees: Trees, log_p_BRN: Tensor, *, eta: float) -> tuple[Tensor, Tensor]:
    """Draft tree reward (GTO, equations 3 to 5) and expected accepted tokens of each tree, both [B, R].

    A branch is worth L = the sum of its prefixes' probabilities under the target; the reward is
    (1 / eta) log sum exp(eta L) over branches. Expected at temperature 1: the sum of all nodes' path probabilities.
    """
    ancestors = trees.ancestors_BRNN.to(log_p_BRN.dtype)
    path_BRN = (ancestors @ log_p_BRN[..., None])[..., 0].exp()
    worth_BRN = (ancestors @ path_BRN[..., None])[..., 0]
    is_parent_BRN = trees.ancestors_BRNN.sum(2) > 1  # a node is on its own path and on those of its children
    reward_BR = (eta * worth_BRN).masked_fill(is_parent_BRN, float("-inf")).logsumexp(-1) / eta
    return reward_BR, path_BRN.sum(-1)


def accepted_paths(trees: Trees, hit_BRN: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of most likely tokens: tokens_BRd (0 behind the path) and lengths_BR."""
    wrong_BRN = (trees.ancestors_BRNN & ~hit_BRN[:, :, None, :]).any(-1)
    depth = int(trees.depths_N[-1])
    # Siblings are distinct tokens, so at most one node a level is right.
    tokens_BRd = (trees.tokens_BRN * ~wrong_BRN).unflatten(2, (depth, -1)).sum(-1)
    return tokens_BRd, (~wrong_BRN).sum(-1)
