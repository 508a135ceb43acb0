"""What methods do within a cycle of one request: propose a block to verify, and commit what stands.

Shape suffixes: B rows of a block, V vocabulary, L MoE layers, k top-k, W words of an expert set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.engine.engine import Block
from moexp.runtime.engine.moe import StepPath
from moexp.runtime.selectors.expert_sets import Words
from moexp.runtime.verifiers.chain import Verdict


@dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
        prompt_ids: at least one token; the last is pending at first.
        max_new_tokens: emitted at most; from 1.
        stop_ids: the answer ends with the first of them (which is emitted).
        number, workload: for the records.

    Raises:
        MoexpError: an empty prompt, or no room for a token.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    number: int = 0
    workload: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise MoexpError("an empty prompt", valid="at least one token")
        if self.max_new_tokens < 1:
            raise MoexpError(f"{self.max_new_tokens} new tokens", where="decode.max_new_tokens", valid="from 1")
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))


@dataclass(frozen=True)
class SelectedTree:
    """A cycle's draft tree.

    Attributes:
        tree: all that was drafted.
        chosen: nodes that are verified, in the order of the block.
        costs: layer-experts that each added when it was picked; empty without predicted experts.
    """

    tree: DraftTree
    chosen: Sequence[int]
    costs: Mapping[int, int]


@dataclass(frozen=True)
class Proposal:
    """A block that is ready to be verified.

    Attributes:
        block: the pending token and the drafted ones.
        confidences: of the drafted tokens.
        verify: from the target's logits [B, V] to the rows that stand.
        ran: routed experts [L, r] that each token run while drafting used; None: nothing drafts.
        predicted: experts [L, k] by row of the block, as far as they are predicted.
        predict_s: seconds that a predictor of its own took.
        tree: what the block was selected from; None for a chain.
        covered_LW: experts that are covered with the block, for the next request of a batch.
    """

    block: Block
    confidences: list[float]
    verify: Callable[[Tensor], Verdict]
    ran: Sequence[np.ndarray] | None = None
    predicted: Mapping[int, np.ndarray] = field(default_factory=dict)
    predict_s: float | None = None
    tree: SelectedTree | None = None
    covered_LW: Words | None = None


class Speculation(Protocol):
    """A method at work on one request.

    Attributes:
        path: of the target's steps.
    """

    path: StepPath

    def propose(self, pending: int, room: int, covered_LW: Words | None) -> Proposal:
        """Draft, predict, select and prefetch.

        Args:
            pending: the last emitted token, at the position of the engine's length.
            room: tokens that may be emitted; from 1.
            covered_LW: experts that cost nothing, for those of the batch's requests before this one are loaded anyway.
        """

    def commit(self, base: int, rows: Sequence[int], emitted: Sequence[int]) -> None:
        """Keep the keys and values of `rows` of the block, behind the first `base` positions; forget the others.

        Args:
            emitted: the token behind each of them; the last is pending, and has no keys and values yet.
        """
