"""Exactness of a decoding method, judged against AR decoding: logits rows bit by bit, and tokens.

Two tiers. Where the backend gives a row the same bits whatever stands beside it (`row_invariant` probes that with
plain matrix multiplications and attention, not with the engine under test), every logits row must be AR's: tier 1,
and any difference is a failure. Where it does not, rounding differs with the block, and a method may part from AR
where the target itself is all but undecided: tier 2, always reported as such with the gap; a difference above the
gap is a failure.

Shape suffixes: T rows of a block, B emitted positions, H input width, V vocabulary, N heads, K keys, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moexp.runtime.decoding.cycle import Cycle
from moexp.runtime.decoding.decode import LogitsDigest
from moexp.runtime.engine.linear import make_linear
from moexp.target.load import Target


@dataclass
class RowLog:
    """A request's emitted tokens, a digest of the logits row behind each, and that row's gap between its two best."""

    tokens: list[int] = field(default_factory=list)
    digest: LogitsDigest = field(default_factory=LogitsDigest)
    gaps: list[float] = field(default_factory=list)

    def __call__(self, cycle: Cycle) -> None:
        self.digest(cycle)
        best_B2 = cycle.logits_BV.topk(2, dim=-1).values
        self.gaps += (best_B2[:, 0] - best_B2[:, 1]).tolist()


@dataclass(frozen=True)
class Mismatch:
    """Where a request first parted from AR. `gap` is between AR's two best logits there; None where AR had ended."""

    prompt: str
    position: int
    gap: float | None


@dataclass
class Outcome:
    """What one method's requests compare to AR's, in one dtype, on one store.

    Attributes:
        rows, differing: logits rows compared, and of them not AR's bit for bit. After a token that differs nothing is
            comparable, and nothing is compared.
        first: the first difference in bits.
        apart: requests whose tokens differ, each where it first did.
        wrong: of these, those that no rounding explains: other tokens from the same logits, or an end that AR had not.
    """

    dtype: str
    store: str
    target: str
    method: str
    prompts: int = 0
    tokens: int = 0
    rows: int = 0
    differing: int = 0
    first: Mismatch | None = None
    apart: list[Mismatch] = field(default_factory=list)
    wrong: int = 0

    def add(self, prompt: str, ar: RowLog, made: RowLog) -> None:
        """Compares one request."""
        self.prompts += 1
        self.tokens += len(made.tokens)
        pairs = itertools.zip_longest(ar.tokens, made.tokens)
        for position, (wanted, found) in enumerate(pairs):
            if wanted is None or found is None:  # one of them went on
                self._part(Mismatch(prompt, position, None), wrong=True)
                return
            self.rows += 1
            place = Mismatch(prompt, position, ar.gaps[position])
            same = ar.digest.rows[position] == made.digest.rows[position]
            if not same:
                self.differing += 1
                self.first = self.first or place
            if wanted != found:
                self._part(place, wrong=same)
                return

    def _part(self, place: Mismatch, *, wrong: bool) -> None:
        self.first = self.first or place
        self.apart.append(place)
        self.wrong += wrong

    def tier(self, row_invariant: bool, near_tie_gap: float) -> int | None:
        """1: bit for bit AR's. 2: apart at near ties only, on a backend that is not row-invariant. None: failed."""
        if not self.differing and not self.apart:
            return 1
        if row_invariant or self.wrong:
            return None
        near_ties = [place.gap is not None and place.gap < near_tie_gap for place in self.apart]
        return 2 if all(near_ties) else None


@dataclass(frozen=True)
class Gate:
    """The gate's result. `invariant` says of each dtype whether the backend is row-invariant."""

    outcomes: tuple[Outcome, ...]
    invariant: dict[str, bool]
    near_tie_gap: float

    def tier(self, outcome: Outcome) -> int | None:
        return outcome.tier(self.invariant[outcome.dtype], self.near_tie_gap)

    @property
    def passed(self) -> bool:
        return all(self.tier(outcome) is not None for outcome in self.outcomes)


# --- the backend ---


def row_invariant(target: Target, *, block: int = 8, keys: int = 512, draws: int = 4) -> bool:
    """Whether a row of a block gets the same bits wherever it stands and whatever stands beside it.

    Probed with the target's own matrices and attention shapes on random input, apart from all code that is being
    tested.
    """
    generator = torch.Generator().manual_seed(0)
    spec, dtype = target.spec, target.dtype
    model: Any = target.model
    weights = [model.get_output_embeddings().weight, *_first_matrices(model)]
    heads = spec.num_heads
    for _ in range(draws):
        for weight in weights:
            linear = make_linear(weight, rows=block, pack=True)
            x_TH = torch.randn(block, weight.shape[1], generator=generator).to(dtype)
            if not _same_rows(linear, x_TH, generator):
                return False
        keys_NKD = torch.randn(heads, keys, 16, generator=generator).to(dtype)

        def attend(x_TND: Tensor, keys_NKD: Tensor = keys_NKD) -> Tensor:
            out = F.scaled_dot_product_attention(x_TND.transpose(0, 1)[None], keys_NKD[None], keys_NKD[None])
            return out[0].transpose(0, 1)

        if not _same_rows(attend, torch.randn(block, heads, 16, generator=generator).to(dtype), generator):
            return False
    return True


def _first_matrices(model: Any) -> list[Tensor]:
    """Attention and feed-forward matrices of the first layer."""
    return [module.weight for module in model.model.layers[0].modules() if isinstance(module, torch.nn.Linear)]


@torch.no_grad()
def _same_rows(function: Callable[[Tensor], Tensor], x_T: Tensor, generator: torch.Generator) -> bool:
    """Moves the rows to other places, and replaces all but one of them: each must keep its bits."""
    y_T = function(x_T)
    order = torch.randperm(len(x_T), generator=generator)
    if not torch.equal(function(x_T[order]), y_T[order]):
        return False
    alone_T = x_T[:1].expand_as(x_T).contiguous()
    return torch.equal(function(alone_T)[0], y_T[0])
