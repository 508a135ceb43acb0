"""What the loops of chains and trees have in common: one cycle is prepared, run as a block of the engine, finished."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.records import StepRecord
from moexp.runtime.engine.engine import Block, StepOut
from moexp.runtime.engine.moe import StepPath


@dataclass
class Prepared:
    """Drafts that are ready to be verified.

    Attributes:
        block: what the target is to run.
        begin_s, drafted_s: when drafting began and ended.
    """

    block: Block
    begin_s: float
    drafted_s: float


class Loop(Protocol):
    """Cycle after cycle on one request.

    Attributes:
        path: of the target's steps.
        stop_ids: tokens that end an answer.
    """

    path: StepPath
    stop_ids: frozenset[int]

    def prepare(self, pending: int, room: int) -> Prepared:
        """Draft from `pending`, at the position of the engine's length; 1 to `room` tokens may be emitted."""

    def finish(self, prepared: Prepared, out: StepOut, request: int, number: int) -> tuple[StepRecord, Tensor]:
        """Verify by what the target gave, and commit.

        Returns:
            the record (without the store's counters), and the logits of the emitted positions.
        """


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Whether there is something to decode.

    Raises:
        MoexpError: an empty prompt, or no room for a token.
    """
    if not all(prompts):
        raise MoexpError("an empty prompt", valid="at least one token")
    if max_new_tokens < 1:
        raise MoexpError(f"{max_new_tokens} new tokens", where="decode.max_new_tokens", valid="from 1")


def finish_reason(tokens: Sequence[int], stop_ids: Collection[int], max_new_tokens: int) -> str:
    """Why an answer ends with the last of these tokens: "stop", "length", or "" where it goes on."""
    if tokens[-1] in stop_ids:
        return "stop"
    return "length" if len(tokens) == max_new_tokens else ""
