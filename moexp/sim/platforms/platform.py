"""A platform to simulate: how fast experts arrive, how many stay, what computing costs; each constant with its source.

Files of platforms are read by `moexp.sim.platforms.files`; how costs add up is in `moexp.sim.machine.costs`, and how
transfers share the link in `moexp.sim.machine.link`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from moexp.config.section import NonNegativeFloat, Positive, PositiveFloat, Section, Share
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.link import LinkModel
from moexp.sim.platforms.geometry import ModelGeometry


class LinkSection(Section):
    """The way from where experts are stored to where they are computed."""

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

    def model(self) -> LinkModel:
        """The link to simulate."""
        alone = None if self.alone_gb_s is None else self.alone_gb_s * 1e9
        latency_s = self.latency_us * 1e-6
        return LinkModel(self.bandwidth_gb_s * 1e9, alone, latency_s, self.concurrency, self.prefetch_concurrency)

    def load_us(self, experts: float, expert_bytes: int) -> float:
        """Transfers of so many experts with nothing beside them."""
        return experts * (self.latency_us / self.concurrency + expert_bytes / (self.bandwidth_gb_s * 1e3))


class SlotsSection(Section):
    """How many routed experts stay where they are computed; neither bytes nor fraction: what one cycle needs."""

    bytes: Positive | None = None
    fraction: Share | None = None
    """Of the bytes of all routed experts."""
    policy: Literal["none", "lru", "lfu"]
    """What stays from one cycle to the next, as in a recipe's `store`; `none` is the papers' cold setting."""

    def experts(self, layer_experts: int, expert_bytes: int) -> int | None:
        """Slots for a model with `layer_experts` routed experts; None: what one cycle needs."""
        if self.fraction is not None:
            return int(self.fraction * layer_experts)
        return None if self.bytes is None else self.bytes // expert_bytes


class ComputeSection(Section):
    """Microseconds of computing, everything in memory. `..._per_token` is that of each row beyond the first."""

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

    def costs(self, dense_layers: int) -> ComputeCosts:
        """The costs of a model with so many layers without routed experts. A draft expert whose cost is not known
        costs what the shared experts do.
        """
        draft_us = self.shared_us_per_layer if self.draft_expert_us is None else self.draft_expert_us
        return ComputeCosts(
            fixed_s=self.fixed_us * 1e-6,
            fixed_row_s=self.fixed_us_per_token * 1e-6,
            attention_s=self.attention_us_per_layer * 1e-6,
            attention_row_s=self.attention_us_per_token * 1e-6,
            router_s=self.router_us * 1e-6,
            shared_s=self.shared_us_per_layer * 1e-6,
            shared_row_s=self.shared_us_per_token * 1e-6,
            expert_s=self.routed_us_per_expert * 1e-6,
            expert_row_s=self.routed_us_per_token * 1e-6,
            draft_expert_s=draft_us * 1e-6,
            dense_layers=dense_layers,
            block_rows=self.block_rows,
        )


class PrecisionSection(Section):
    """Storage formats, keys of `moexp.sim.platforms.geometry.PRECISIONS`."""

    experts: str
    """Of routed experts, as they cross the link."""
    resident: str
    """Of attention, shared experts and dense layers."""


class SimPlatform(Section):
    """One platform, for one model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    summary: str
    tag: Literal["paper", "measured"]
    """Origin of the constants: a paper's figures (published rates where it gives none), or this very machine."""
    model: str
    """Whose `compute` this is."""
    link: LinkSection
    slots: SlotsSection
    compute: ComputeSection
    precision: PrecisionSection
    given: dict[str, float] = {}
    """What other constants are derived from."""
    checks: dict[str, float] = {}
    """Figures to hold a simulation against; it does not use them."""
    sources: dict[str, str]
    """Dotted key of each constant -> where it comes from."""
    provenance: dict[str, Any] = {}
    """Of measured ones: command, commit, versions, hardware."""

    def constants(self) -> Iterator[tuple[str, Any]]:
        """Dotted key and value of every constant that is set."""
        for section, values in self.model_dump(include=set(SECTIONS), exclude_none=True).items():
            yield from ((f"{section}.{key}", value) for key, value in values.items())

    def expert_bytes(self, geometry: ModelGeometry) -> int:
        """Bytes of one routed expert on the link."""
        return geometry.expert_bytes(self.precision.experts)


SECTIONS = ("link", "slots", "compute", "precision", "given", "checks")
"""Sections of constants, in the order of a file."""
TYPED: dict[str, type[Section]] = {
    "link": LinkSection,
    "slots": SlotsSection,
    "compute": ComputeSection,
    "precision": PrecisionSection,
}
"""Those whose keys are fixed."""
