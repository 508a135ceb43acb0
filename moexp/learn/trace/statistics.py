"""Statistics of a routing trace: how evenly experts are used, and how the union of experts grows with a block.

Shapes: T tokens, L MoE layers, E experts, k experts a token, B block lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moexp.data.traces import RoutingGeometry, TraceShard, expert_counts
from moexp.metrics import uniform_union

LONGEST_BLOCK = 8


@dataclass(frozen=True)
class ExpertLoad:
    """How often each expert was chosen."""

    counts_LE: np.ndarray

    @property
    def dead_L(self) -> np.ndarray:
        """Experts of each layer that no token chose."""
        return (self.counts_LE == 0).sum(1)

    @property
    def least_L(self) -> np.ndarray:
        """Load of each layer's least used expert over the layer's mean."""
        return self.counts_LE.min(1) / self.counts_LE.mean(1)

    @property
    def most_L(self) -> np.ndarray:
        """Load of each layer's busiest expert over the layer's mean."""
        return self.counts_LE.max(1) / self.counts_LE.mean(1)


@dataclass(frozen=True)
class UnionGrowth:
    """Distinct experts that blocks of consecutive tokens choose in a layer.

    Paper: DraftExpert eq. 3; DraftExpert Figure 5.
    """

    unique_LB: np.ndarray  # mean over all blocks of 1 to B tokens; NaN where no text is that long
    blocks_B: np.ndarray  # number of blocks in a layer
    uniform_B: np.ndarray  # expectation if every token chose its k experts uniformly and independently

    @property
    def mean_B(self) -> np.ndarray:
        """Mean over layers."""
        return self.unique_LB.mean(0)


def expert_load(shards: Iterable[TraceShard], geometry: RoutingGeometry) -> ExpertLoad:
    """Counts choices of each expert."""
    return ExpertLoad(expert_counts(shards, geometry))


def union_growth(shards: Iterable[TraceShard], geometry: RoutingGeometry, longest: int = LONGEST_BLOCK) -> UnionGrowth:
    """Union sizes over all blocks of 1 to `longest` consecutive tokens of the same text."""
    layers, experts = len(geometry.layers), geometry.num_experts
    sums_LB = np.zeros((layers, longest))
    blocks_B = np.zeros(longest, dtype=np.int64)
    for shard in shards:
        follows = [_starts(shard, length) for length in range(1, longest + 1)]
        blocks_B += [int(starts_T.sum()) for starts_T in follows]
        for layer in range(layers):
            chosen_TE = np.zeros((len(shard), experts), dtype=bool)
            np.put_along_axis(chosen_TE, shard.experts_TLk[:, layer].astype(np.int64), True, axis=1)
            union_TE = chosen_TE.copy()
            for length, starts_T in enumerate(follows, start=1):
                if length > 1:
                    union_TE = union_TE[:-1] | chosen_TE[length - 1 :]
                if not len(union_TE):
                    break
                sums_LB[layer, length - 1] += union_TE[starts_T[: len(union_TE)]].sum()
    with np.errstate(invalid="ignore"):
        unique_LB = np.where(blocks_B, sums_LB / blocks_B, np.nan)
    uniform_B = np.array([uniform_union(experts, geometry.top_k, length) for length in range(1, longest + 1)])
    return UnionGrowth(unique_LB, blocks_B, uniform_B)


def _starts(shard: TraceShard, length: int) -> np.ndarray:
    """Where `length` tokens of one text begin, bool [T]."""
    starts_T = np.zeros(len(shard), dtype=bool)
    count = len(shard) - length + 1
    if count > 0:
        starts_T[:count] = shard.sample_T[:count] == shard.sample_T[length - 1 :]
    return starts_T
