"""Group Tree Optimization (arXiv 2509.22134): an EAGLE-3 head goes on learning with the reward of draft trees.

The head M and its frozen start M0 draft trees at groups of m adjacent positions, and one target pass values them. The
reward R = reward(M) - reward(M0) (equation 9), standardised within its group, is the advantage A (10). On the longest
path of M's tree that the target accepts greedily, of length l, the ratio s = (M(path) / M0(path))^(1/l) (11) enters a
clipped surrogate (12), added to EAGLE-3's token loss (13). The paper gives no epsilon and no floor of the deviation.

Shape suffixes: B rows, R roots a row (groups x m), d depth of the trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from moexp.base.errors import MoexpError
from moexp.learn.core.loop import Metrics
from moexp.learn.heads.chains import Chains, Seen
from moexp.learn.heads.draft_tree import accepted_paths, grow_trees, read_target, tree_rewards
from moexp.target.heads.eagle_head import EagleHead


@dataclass(frozen=True)
class TreeSettings:
    """The tree part of the loss; defaults are the paper's where it gives them."""

    depth: int = 3  # of the trees, as drafted in decoding (`draft_tree.grow_trees`)
    width: int = 2
    groups: int = 2  # K, groups a row
    group: int = 8  # m, adjacent positions a group
    eta: float = 1.0  # sharpness of the reward's smooth maximum over branches
    weight: float = 0.5  # omega, of the surrogate beside the token loss
    clip: float = 0.2  # epsilon, how far the ratio may move the loss
    floor: float = 1e-3
    """Added to the standard deviation: at the start M = M0, and rewards are rounding noise."""

    def __post_init__(self) -> None:
        for name in ("depth", "width", "groups", "group"):
            if getattr(self, name) < 1:
                raise MoexpError(f"{name} {getattr(self, name)}", valid="from 1")
        if self.group < 2:
            raise MoexpError("groups of one position have no standard deviation", valid="group from 2")


def group_roots(pairs: int, tree: TreeSettings, seed: int, step: int) -> Tensor:
    """The roots of a step: `groups` disjoint runs of `group` adjacent positions, at random.

    Raises:
        MoexpError: rows too short for so many groups.
    """
    if tree.groups * tree.group > pairs:
        raise MoexpError(
            f"{tree.groups} groups of {tree.group} positions in rows of {pairs + 1} tokens",
            valid=f"up to {pairs // tree.group} groups",
        )
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    offset = int(torch.randint(pairs % tree.group + 1, (), generator=generator))
    chosen_K = torch.randperm(pairs // tree.group, generator=generator)[: tree.groups].sort().values
    return (offset + chosen_K[:, None] * tree.group + torch.arange(tree.group)).flatten()


def tree_loss(
    chains: Chains,
    reference: EagleHead,
    rows_BL: Tensor,
    seen: Seen,
    model: PreTrainedModel,
    cache: DynamicCache,
    roots_R: Tensor,
    tree: TreeSettings,
) -> tuple[Tensor, Metrics]:
    """GTO's equation 12 over all groups of a batch, and metrics; extends `cache`, the target's keys of the rows.

    `chains` stand at step 0. Metrics: `reward` and `expected` (tokens accepted at temperature 1), also of the
    `_reference`, `path` (mean length of the accepted path), `ratio`, `clipped` (share).
    """
    with torch.no_grad():
        fixed = Chains(reference, rows_BL, seen.features_BLF)
        trees, fixed_trees = (
            grow_trees(start.fork(roots_R), depth=tree.depth, width=tree.width) for start in (chains, fixed)
        )
        log_p, hit = read_target(model, cache, seen, torch.cat([roots_R, roots_R]), trees.with_roots_from(fixed_trees))
        roots = len(roots_R)
        reward_BR, expected_BR = tree_rewards(trees, log_p[:, :roots], eta=tree.eta)
        base_BR, base_expected_BR = tree_rewards(fixed_trees, log_p[:, roots:], eta=tree.eta)
        tokens_BRd, length_BR = accepted_paths(trees, hit[:, :roots])
        advantage_BR = group_advantages(reward_BR - base_BR, tree.group, tree.floor)
        old_BR = path_log_likelihood(fixed.fork(roots_R), tokens_BRd, length_BR)
    new_BR = path_log_likelihood(chains.fork(roots_R), tokens_BRd, length_BR)
    ratio_BR = ((new_BR - old_BR) / length_BR.clamp_min(1)).exp()
    loss = clipped_surrogate(ratio_BR, advantage_BR, tree.clip)
    outside = (ratio_BR - 1).abs() > tree.clip
    metrics = {
        "reward": reward_BR, "reward_reference": base_BR,
        "expected": expected_BR, "expected_reference": base_expected_BR,
        "path": length_BR.float(), "ratio": ratio_BR.detach(), "clipped": outside.float(),
    }  # fmt: skip
    return loss, {name: float(value.mean()) for name, value in metrics.items()}


def group_advantages(reward_BR: Tensor, group: int, floor: float) -> Tensor:
    """GTO's equation 10: rewards minus their group's mean, over its (population) standard deviation."""
    grouped = reward_BR.unflatten(1, (-1, group))
    centred = grouped - grouped.mean(-1, keepdim=True)
    return (centred / (grouped.std(-1, correction=0, keepdim=True) + floor)).flatten(1)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """GTO's equation 12, the mean over all positions."""
    bounded = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, bounded * advantage).mean()


def path_log_likelihood(chains: Chains, tokens_BRd: Tensor, length_BR: Tensor) -> Tensor:
    """log q [B, R] of the first `length` tokens of each root's path, drafted step by step; 0 for empty paths."""
    head = chains.head
    total_BR = torch.zeros(length_BR.shape, device=length_BR.device)
    longest = int(length_BR.max())
    for step in range(longest):
        log_q_BRD = head.logits(chains.hidden).log_softmax(-1)
        draft_BR = head.draft_ids(tokens_BRd[..., step]).clamp_min(0)
        chosen_BR = log_q_BRD.gather(2, draft_BR[..., None])[..., 0]
        total_BR = total_BR + torch.where(step < length_BR, chosen_BR, 0.0)
        if step + 1 < longest:
            chains.extend(tokens_BRd[..., step])
    return total_BR
