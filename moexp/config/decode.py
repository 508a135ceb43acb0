"""How to decode: drafting, selection, sampling, and where experts are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moexp.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, Share


class TreeSection(Section):
    """A draft tree in place of a chain (EcoSpec): how it is grown, and which nodes are verified."""

    steps: Positive = 3
    """Draft steps."""
    width: Positive = 2
    """Tokens drafted behind each node that a step expands."""
    beam: Positive = 2
    """Nodes that the next step expands."""
    pruned: bool = False
    """Whether candidates that are not expanded leave the tree."""
    selector: Literal["confidence", "global-cost", "marginal-cost", "confidence-expansion"] = "marginal-cost"
    gamma: Positive = 8
    """Nodes verified, the pending token included."""
    epsilon: PositiveFloat = 1.0
    """Added to a node's cost, in layer-experts (EcoSpec, eq. 9 and 10; the paper gives no value)."""
    predictor: Literal["draft-router", "learned", "none"] = "draft-router"
    """Whose expert sets selection and prefetch go by."""


class DecodeSection(Section):
    """The decoding method and its sampling."""

    drafter: Literal["ar", "top-r", "draft-expert", "head", "target"] = "draft-expert"
    """`head` is that of `moexp train-drafter`, for trees. `target` lets the target draft for itself: a control in which
    every draft must be accepted."""
    r: Annotated[int, Field(ge=1)] = 1
    """Routed experts a token uses while drafting."""
    max_draft: Annotated[int, Field(ge=1, le=64)] = 4
    """Drafted tokens a cycle at most (K)."""
    policy: Literal["fixed", "confidence", "confidence-expansion"] = "confidence-expansion"
    tau: Share = 0.5
    """Confidence below which a draft token may be dropped (DraftExpert, eq. 14)."""
    budget: NonNegative | Literal["cache"] = 60
    """New layer-experts a doubtful token may bring (B in eq. 14), or `cache`: derived from free slots."""
    prefetch: bool = True
    """Launch the experts that the draft router predicts for verification."""
    prefetch_top: Positive | None = None
    """Of each layer only this many, by descending gate: the surest; null: all top-k."""
    tree: TreeSection | None = None
    """Draft a tree; max_draft and policy then do not apply."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_k: NonNegative = 0
    """0 keeps the whole vocabulary."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 128


class PaceSection(Section):
    """An emulated link: transfers take at least as long as they would there."""

    bandwidth_gb_s: PositiveFloat
    latency_us: NonNegativeFloat = 0.0
    concurrency: Positive = 1


class StoreSection(Section):
    """Where expert weights are and how they arrive."""

    kind: Literal["resident", "host", "disk"] = "disk"
    policy: Literal["none", "lru", "lfu", "least-stale", "static-hot"] = "none"
    """What stays from one cycle to the next; `none` is the papers' cold setting. `static-hot` keeps the experts that
    the target's routing trace has most often (`moexp trace-routing`)."""
    budget_mib: PositiveFloat | None = None
    """Accelerator-side slots; null gives what one cycle needs at most."""
    io_threads: Positive = 8
    pace: PaceSection | None = None
