"""Blocks from a plain routing trace: no drafter was run, so its drafts and their acceptance are assumed.

A traced token counts as pending, the next K as drafts: they are routed as the target routed them, and their acceptance
is drawn from given probabilities. Rejected rows keep the routing of the traced text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from moexp.base.errors import MoexpError
from moexp.data.traces import Trace
from moexp.sim.routing.blocks import Block, Blocks


def traced_blocks(
    trace: Trace,
    acceptance: Sequence[float] | None,
    max_draft: int,
    *,
    tokens: int | None = None,
    layers: int | None = None,
    seed: int = 0,
) -> Blocks:
    """Blocks of `max_draft` top-1 drafts over the texts of a trace.

    Args:
        acceptance: assumed probability that the draft at each position of a block is accepted if those before it are
            (the last one given holds for all further positions); it is the confidence there as well. None: all are
            accepted (the oracle).
        tokens: at most so many traced ones; None: all.
        layers: see `Blocks`.
        seed: of what is drawn.

    Raises:
        MoexpError: a probability that is none, or a trace with no text of two tokens.
    """
    chances = [1.0] if acceptance is None else list(acceptance)
    if not chances or not all(0 <= chance <= 1 for chance in chances):
        raise MoexpError(f"acceptance {chances}", valid="probabilities from 0 to 1")
    chances = [chances[min(position, len(chances) - 1)] for position in range(max_draft)]
    draw = np.random.default_rng(seed)
    blocks = [block for text_TLk in _texts(trace, tokens) for block in _blocks(text_TLk, chances, draw)]
    return Blocks(blocks, trace.geometry, top_r=1, draft_experts=False, layers=layers)


def _texts(trace: Trace, tokens: int | None) -> Iterator[np.ndarray]:
    """Routing [T, L, k] of each text."""
    left = tokens if tokens is not None else 1 << 62
    for shard in trace.shards():
        bounds = [0, *(np.flatnonzero(np.diff(shard.sample_T)) + 1).tolist(), len(shard)]
        for begin, end in pairwise(bounds):
            end = min(end, begin + left)
            left -= end - begin
            if end > begin:
                yield shard.experts_TLk[begin:end].astype(np.int16)


def _blocks(text_TLk: np.ndarray, chances: Sequence[float], draw: np.random.Generator) -> Iterator[Block]:
    begin, length = 0, len(text_TLk)
    while begin < length:
        drafts = min(len(chances), length - begin - 1)
        stands = draw.random(len(chances)) < np.array(chances)
        accepted = min(int(np.argmin(np.append(stands, False))), drafts)
        rows_LBk = text_TLk[begin : begin + drafts + 1].swapaxes(0, 1)
        yield Block(tuple(chances[:drafts]), rows_LBk[:, :drafts], rows_LBk, accepted, accepted + 1)
        begin += accepted + 1
