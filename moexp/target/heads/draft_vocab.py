"""A reduced draft vocabulary: the tokens a head may propose, with the maps that published EAGLE-3 heads carry.

`d2t` holds offsets, not ids: draft token i is target token i + d2t[i]. `t2d` says of each target token whether it can
be drafted.

Shape suffixes: V target vocabulary, D draft vocabulary, N rows, L tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moexp.base.errors import MoexpError


@dataclass(frozen=True)
class DraftVocab:
    """Both maps of a draft vocabulary.

    Attributes:
        d2t: int64 [D], offsets.
        t2d: bool [V].
    """

    d2t: Tensor
    t2d: Tensor

    @property
    def target_ids(self) -> Tensor:
        """int64 [D]: the target token of each draft token."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def draft_ids(self) -> Tensor:
        """int64 [V]: the draft token of each target token, -1 where there is none."""
        table_V = torch.full((len(self.t2d),), -1, dtype=torch.long, device=self.d2t.device)
        table_V[self.target_ids] = torch.arange(len(self.d2t), device=self.d2t.device)
        return table_V

    @classmethod
    def from_ids(cls, target_ids: Iterable[int], vocab: int) -> DraftVocab:
        """The vocabulary of these distinct target ids, in ascending order."""
        ids_D = torch.tensor(sorted(set(target_ids)), dtype=torch.long)
        if not len(ids_D) or ids_D[0] < 0 or ids_D[-1] >= vocab:
            raise MoexpError("a draft vocabulary with ids outside the target's", valid=f"ids from 0 to {vocab - 1}")
        t2d_V = torch.zeros(vocab, dtype=torch.bool)
        t2d_V[ids_D] = True
        return cls(ids_D - torch.arange(len(ids_D)), t2d_V)


def token_counts(rows_NL: Tensor, vocab: int) -> Tensor:
    """How often each token occurs in a corpus: int64 [V].

    Raises:
        MoexpError: the corpus holds ids outside the vocabulary.
    """
    flat = rows_NL.flatten().long()
    if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < vocab:
        raise MoexpError(f"a corpus with token id {int(flat.max())}", valid=f"ids from 0 to {vocab - 1}")
    return torch.bincount(flat, minlength=vocab)


def pick_draft_vocab(counts_V: Tensor, size: int, *, always: Iterable[int] = ()) -> DraftVocab:
    """The `size` most frequent tokens (ties: the lower id), among them those in `always` (such as end-of-text).

    Raises:
        MoexpError: `size` is not between the number of tokens in `always` and the vocabulary's size.
    """
    vocab, forced = len(counts_V), sorted(set(always))
    if not max(1, len(forced)) <= size <= vocab:
        raise MoexpError(
            f"a draft vocabulary of {size} tokens", where="draft_vocab", valid=f"{max(1, len(forced))} to {vocab}"
        )
    if forced and not 0 <= forced[0] <= forced[-1] < vocab:
        raise MoexpError(f"token id {forced[-1]} cannot be drafted", valid=f"ids from 0 to {vocab - 1}")
    first = counts_V.clone()
    first[forced] = counts_V.max() + 1
    return DraftVocab.from_ids(first.argsort(descending=True, stable=True)[:size].tolist(), vocab)


def coverage(vocab: DraftVocab, counts_V: Tensor) -> float:
    """Share of a corpus's tokens that can be drafted: an upper bound on greedy acceptance."""
    return float(counts_V[vocab.t2d].sum() / counts_V.sum().clamp_min(1))


def checked_vocab(d2t: Tensor | None, t2d: Tensor | None, *, draft: int, vocab: int, where: str) -> DraftVocab:
    """The vocabulary that a checkpoint's maps describe.

    Args:
        d2t, t2d: as stored. Without both, the draft vocabulary must be the target's; t2d alone may be left out.
        draft: D, rows of the head's output projection.
        vocab: V, of the target.

    Raises:
        MoexpError: sizes, ids or the two maps do not fit each other or the target.
    """
    if d2t is None:
        if draft != vocab or (t2d is not None and not bool(t2d.bool().all())):
            what = f"a draft vocabulary of {draft} tokens without a d2t map"
            raise MoexpError(what, where=where, valid=f"d2t, or all {vocab}")
        return DraftVocab.from_ids(range(vocab), vocab)
    if d2t.shape != (draft,):
        what = f"d2t has shape {list(d2t.shape)}, but lm_head has {draft} rows"
        raise MoexpError(what, where=where, valid=f"[{draft}]")
    if t2d is not None and t2d.shape != (vocab,):
        what = f"t2d has shape {list(t2d.shape)}, but the target has {vocab} tokens"
        raise MoexpError(what, where=where, valid=f"[{vocab}]")
    if d2t.is_floating_point():
        raise MoexpError(f"d2t is stored as {d2t.dtype}", where=where, valid="integers")
    ids_D = torch.arange(draft) + d2t.long()
    outside = ids_D[(ids_D < 0) | (ids_D >= vocab)]
    if len(outside):
        what = f"d2t leads to token {int(outside[0])} and {len(outside) - 1} more outside the target's vocabulary"
        raise MoexpError(what, where=where, valid=f"offsets to ids from 0 to {vocab - 1}")
    if len(ids_D.unique()) != draft:
        raise MoexpError("d2t leads to a token twice", where=where, valid="one draft token for each target token")
    drafted_V = torch.zeros(vocab, dtype=torch.bool)
    drafted_V[ids_D] = True
    if t2d is not None and not torch.equal(t2d.bool(), drafted_V):
        what = f"d2t and t2d disagree about {int((t2d.bool() != drafted_V).sum())} tokens"
        raise MoexpError(what, where=where, valid="both maps of one draft vocabulary")
    return DraftVocab(d2t.long(), drafted_V)
