"""What is trained for a target: draft experts, draft heads, expert predictors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moexp.config.section import DType, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from moexp.config.target import CorpusSection


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
    optimizer: Literal["adamw", "muon"] = "muon"
    """After the warm-up: Muon (orthogonalised momentum) learns matrices, AdamW the rest; or AdamW all of it."""
    corpus: CorpusSection = CorpusSection(author="both", tokens=600_000)
    held_out_rows: Positive = 32
    """Corpus rows kept for measuring, not trained on."""
    max_minutes: PositiveFloat | None = 8.0


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
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW; or Muon for the layer's matrices and AdamW for the rest."""
    tree_width: Positive = 2
    """Of GTO's draft trees; their depth is `unroll`."""
    tree_weight: NonNegativeFloat = 0.5
    """Of GTO's reward beside the token loss."""
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
    """A source of `moexp.data.prompts.load_texts` to trace; null: the corpus of `draft`."""
    context: Positive = 256
    """Tokens that attention reaches back; texts are cut to it."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the samples."""
    start_tokens: NonNegative = 60_000
    """Training tokens that the head is first fitted to in closed form; 0: it starts near zero."""
    epochs: Positive = 10
    batch: Positive = 16
    """Pieces of text a step."""
    lr: PositiveFloat = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Adam as in the paper (without weight decay); or Muon for matrices and Adam for the rest."""
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
