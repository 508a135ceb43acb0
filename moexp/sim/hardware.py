"""The constants of a simulated platform by section: link, slots, computing, storage formats.

Costs add up as follows; "rows" are the tokens of a step. Every part has the cost of its first row and that of each
further row:

    step = fixed + layers x attention + MoE layers x (router + shared) + sum over experts of the union: routed(its rows)
    transfer = latency + bytes / bandwidth, where transfers under way share the bandwidth
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from moexp.config.section import NonNegativeFloat, Positive, PositiveFloat, Section, Share
from moexp.sim.geometry import PRECISIONS

NATIVE = "native"  # a precision: the checkpoint's own


class LinkSection(Section):
    """The way from where experts are kept to where they are computed."""

    bandwidth_gb_s: PositiveFloat
    """What transfers get together, 10^9 bytes a second."""
    peak_gb_s: PositiveFloat
    """What the hardware is specified for; not used, to stand beside the other."""
    latency_us: NonNegativeFloat
    """Of each transfer, before its first byte."""
    concurrency: Positive
    """Transfers of experts under way at once."""
    prefetch_concurrency: Positive
    """Of these, how many may be prefetches."""
    alone_gb_s: PositiveFloat | None = None
    """What a transfer gets that has the link for itself; null: all of it."""


class SlotsSection(Section):
    """How many routed experts stay where they are computed; neither bytes nor fraction: what one cycle needs."""

    bytes: Positive | None = None
    fraction: Share | None = None
    """Of the bytes of all routed experts."""
    policy: Literal["none", "lru", "lfu"]
    """What stays from one cycle to the next, as in a recipe's `store`; `none` is the papers' cold setting."""


class ComputeSection(Section):
    """Microseconds of computing, everything in place. `..._per_token` is that of each row beyond the first."""

    attention_us_per_layer: NonNegativeFloat
    attention_us_per_token: NonNegativeFloat
    shared_us_per_layer: NonNegativeFloat
    """The shared experts of a MoE layer."""
    shared_us_per_token: NonNegativeFloat
    router_us: NonNegativeFloat
    """Router and bookkeeping of a MoE layer."""
    routed_us_per_expert: NonNegativeFloat
    """One routed expert over its first row."""
    routed_us_per_token: NonNegativeFloat
    """Each further row of an expert."""
    fixed_us: NonNegativeFloat
    """Once a step: embedding, dense layers, head, and whatever no other part accounts for."""
    fixed_us_per_token: NonNegativeFloat
    draft_expert_us: NonNegativeFloat | None = None
    """One layer's draft expert over one row (DraftExpert, eq. 5); null: not known."""
    draft_head_us: NonNegativeFloat | None = None
    """One draft step of a head (EAGLE-3, MTP); null: not known."""
    predictor_us: NonNegativeFloat | None = None
    """A learned expert predictor, once a cycle; null: not known."""
    block_rows: Positive
    """Rows that AR and verification steps compute whatever counts of them (padding); 1: no padding."""

    def attention_us(self, rows: int) -> float:
        """One layer's attention."""
        return self.attention_us_per_layer + (rows - 1) * self.attention_us_per_token

    def shared_us(self, rows: int) -> float:
        """One MoE layer's shared experts."""
        return self.shared_us_per_layer + (rows - 1) * self.shared_us_per_token

    def routed_us(self, rows: int) -> float:
        """One routed expert over `rows` rows."""
        return self.routed_us_per_expert + (rows - 1) * self.routed_us_per_token

    def step_fixed_us(self, rows: int) -> float:
        """What a step costs outside of attention and MoE layers."""
        return self.fixed_us + (rows - 1) * self.fixed_us_per_token

    def padded(self, rows: int) -> int:
        """Rows that an AR or verification step of `rows` live ones computes."""
        return -(-rows // self.block_rows) * self.block_rows


class PrecisionSection(Section):
    """Storage formats, keys of `moexp.sim.geometry.PRECISIONS`."""

    experts: str
    """Of routed experts, as they cross the link."""
    resident: str
    """Of attention, shared experts and dense layers."""

    @model_validator(mode="after")
    def _known(self) -> PrecisionSection:
        for name in (self.experts, self.resident):
            if name not in PRECISIONS:
                raise ValueError(f"one of {', '.join(PRECISIONS)}, {NATIVE}")
        return self
