"""Routing traces as training data: texts cut to the predictor's context, split by sample, dealt in batches. No model.

Shapes: R rows (pieces of texts), T tokens of a trace, B rows of a batch, P tokens of a batch, L MoE layers, k experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.data.traces import RoutingGeometry, Trace, TraceShard


@dataclass(frozen=True)
class RoutingRows:
    """A trace in memory, and the rows it is cut into: row r is the tokens `begin_R[r]` to `end_R[r]`."""

    geometry: RoutingGeometry
    token_T: np.ndarray
    experts_TLk: np.ndarray
    first_T: np.ndarray  # whether a token is the first of its sample
    begin_R: np.ndarray
    end_R: np.ndarray
    sample_R: np.ndarray  # the sample that each row is a piece of

    def __len__(self) -> int:
        return len(self.begin_R)

    def tokens_of(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Indices into the trace of all tokens of these rows, in order."""
        return np.concatenate([np.arange(self.begin_R[row], self.end_R[row]) for row in rows])


@dataclass(frozen=True)
class RoutingBatch:
    """Some rows, padded behind."""

    ids_BT: Tensor  # token ids
    live_BT: Tensor  # which are no padding
    experts_PLk: Tensor  # what the live tokens were routed to, row by row

    def to(self, device: torch.device) -> RoutingBatch:
        """The same on another device."""
        return RoutingBatch(self.ids_BT.to(device), self.live_BT.to(device), self.experts_PLk.to(device))


def read_rows(trace: Trace, context: int, vocab: int) -> RoutingRows:
    """All of a trace, cut into rows of at most `context` tokens; MoexpError for a token outside the vocabulary."""
    rows = rows_of(list(trace.shards()), trace.geometry, context)
    if len(rows.token_T) and not 0 <= int(rows.token_T.min()) <= int(rows.token_T.max()) < vocab:
        raise MoexpError(f"a token outside a vocabulary of {vocab}", where=str(trace.folder), valid="trace again")
    return rows


def rows_of(shards: Sequence[TraceShard], geometry: RoutingGeometry, context: int) -> RoutingRows:
    """Shards of a trace in order, cut into rows."""
    sample_T = np.concatenate([shard.sample_T for shard in shards])
    first_T = np.diff(sample_T, prepend=sample_T[0] - 1) != 0
    starts = np.flatnonzero(first_T)
    ends = np.append(starts[1:], len(sample_T))
    pieces = [
        (begin, min(begin + context, int(end)), int(sample_T[begin]))
        for start, end in zip(starts, ends, strict=True)
        for begin in range(int(start), int(end), context)
    ]
    begin_R, end_R, sample_R = (np.array(column) for column in zip(*pieces, strict=True))
    token_T = np.concatenate([shard.token_T for shard in shards])
    experts_TLk = np.concatenate([shard.experts_TLk for shard in shards])
    return RoutingRows(geometry, token_T, experts_TLk, first_T, begin_R, end_R, sample_R)


def split_rows(rows: RoutingRows, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to train on, rows held out): a random share of the samples; MoexpError for a trace of one sample."""
    samples = np.unique(rows.sample_R)
    if len(samples) < 2:
        raise MoexpError("a trace of one sample cannot be split", where="predictor", valid="at least two samples")
    count = min(max(1, round(held_out * len(samples))), len(samples) - 1)
    drawn = np.random.default_rng(seed).permutation(samples)[:count]
    held_R = np.isin(rows.sample_R, drawn)
    return np.flatnonzero(~held_R), np.flatnonzero(held_R)


def batch_of(rows: RoutingRows, chosen: Sequence[int] | np.ndarray) -> RoutingBatch:
    """These rows as one batch."""
    lengths_B = rows.end_R[chosen] - rows.begin_R[chosen]
    live_BT = np.arange(lengths_B.max()) < lengths_B[:, None]
    index_P = rows.tokens_of(chosen)
    ids_BT = np.zeros(live_BT.shape, dtype=np.int64)
    ids_BT[live_BT] = rows.token_T[index_P]
    experts_PLk = rows.experts_TLk[index_P].astype(np.int64)
    return RoutingBatch(torch.from_numpy(ids_BT), torch.from_numpy(live_BT), torch.from_numpy(experts_PLk))
