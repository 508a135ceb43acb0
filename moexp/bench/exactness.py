"""Exactness of a decoding method, judged against AR decoding: logits rows bit by bit, and tokens.

Two tiers. Where the backend gives a row the same bits whatever stands beside it (`row_invariant` probes that with
plain matrix multiplications and attention, not with the engine under test), every logits row must be AR's: tier 1,
and any difference is a failure. Where it does not, rounding differs with the block, and a method may part from AR
where the target itself is all but undecided: tier 2, always reported as such with the gap; a difference above the
gap is a failure.

Shape suffixes: B emitted positions, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from moexp.runtime.decoding.cycle import Cycle
from moexp.runtime.decoding.decode import LogitsDigest


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

    def add(self, prompt: str, ar: RowLog, answer: RowLog) -> None:
        """Compares one request."""
        self.prompts += 1
        self.tokens += len(answer.tokens)
        for position, (wanted, token) in enumerate(itertools.zip_longest(ar.tokens, answer.tokens)):
            if wanted is None or token is None:  # one of them went on
                self._part(Mismatch(prompt, position, None), wrong=True)
                return
            self.rows += 1
            here = Mismatch(prompt, position, ar.gaps[position])
            same = ar.digest.rows[position] == answer.digest.rows[position]
            if not same:
                self.differing += 1
                self.first = self.first or here
            if wanted != token:
                self._part(here, wrong=same)
                return

    def _part(self, mismatch: Mismatch, *, wrong: bool) -> None:
        self.first = self.first or mismatch
        self.apart.append(mismatch)
        self.wrong += wrong

    def tier(self, row_invariant: bool, near_tie_gap: float) -> int | None:
        """1: bit for bit AR's. 2: apart at near ties only, on a backend that is not row-invariant. None: failed."""
        if not self.differing and not self.apart:
            return 1
        if row_invariant or self.wrong:
            return None
        near_ties = [one.gap is not None and one.gap < near_tie_gap for one in self.apart]
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
