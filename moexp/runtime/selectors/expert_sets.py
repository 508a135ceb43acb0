"""Expert sets as bitmasks: of each MoE layer W words of 64 bits, bit e of a layer for expert e.

Shape suffixes: N nodes, L MoE layers, E experts a layer, k top-k, W words a layer.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from moexp.runtime.drafters.draft_tree import Ints

Words = NDArray[np.uint64]


def pack_experts(ids: NDArray[np.integer], num_experts: int) -> Words:
    """Bitmasks [..., W] of sets given as expert ids [..., k] below `num_experts`."""
    assert ids.size == 0 or 0 <= int(ids.min()) <= int(ids.max()) < num_experts
    width = -(-num_experts // 64) * 64
    sets = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1])
    member = np.zeros(len(sets) * width, dtype=bool)
    member[sets + np.arange(len(sets))[:, None] * width] = True
    words = np.packbits(member, bitorder="little").view("<u8").astype(np.uint64, copy=False)
    return words.reshape(*ids.shape[:-1], width // 64)


def unpack_experts(words: Words, num_experts: int) -> NDArray[np.bool_]:
    """Membership [..., E] of bitmasks [..., W]."""
    octets = np.ascontiguousarray(words).astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=num_experts, bitorder="little").astype(bool)


def count_experts(words: Words) -> Ints:
    """Layer-experts of bitmasks [..., L, W]."""
    return np.bitwise_count(words).sum(axis=(-2, -1), dtype=np.int64)
