"""What is measured: tables, the exactness gate, the sweep."""

from __future__ import annotations

from typing import Literal

from moexp.config.section import DType, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, Share


class BenchSection(Section):
    """`moexp bench`: what the tables run over."""

    workloads: tuple[str, ...] = ("chat", "math", "code", "summary", "instruct")
    """Sources of `moexp.data.prompts.load_prompts`: embedded names, paths of JSONL files, or hub data sets."""
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
    part_minutes: PositiveFloat | None = None
    """On one platform, about (half of it where loading is emulated): where the warm-up says that it takes longer, every
    prompt gets fewer new tokens.
    """
    warmup_prompts: NonNegative = 1
    """Prompts decoded before anything is counted."""
    tables: tuple[Positive, ...] = (2, 3, 4, 5, 6)
    """Of DraftExpert, those that `moexp reproduce` measures."""
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
    gamma_sweep: tuple[Positive, ...] = (3, 4, 5, 6)
    """Of the sweep (Tables 11 and 12)."""
    batch_sweep: tuple[Positive, ...] = (1, 2, 4, 8)
    """Requests decoded together (Tables 6 to 8)."""
    epsilon: PositiveFloat = 1.0
    """Added to a node's marginal cost, in experts over all layers (equation 9); the paper gives no value."""
    epsilon_sweep: tuple[PositiveFloat, ...] = (0.1, 10.0, 100.0)
    """Further values, of one head (Table 4)."""
    platforms: tuple[Literal["resident", "local-disk"], ...] = ("resident", "local-disk")
    """Where the experts are: in memory (everything is measured there), cold on the disk (the main run at T = 0)."""
    prompts: Positive = 2
    """A workload, with experts in memory."""
    disk_prompts: Positive = 1
    """A workload, with experts on the disk."""
    max_new_tokens: Positive = 24
    disk_new_tokens: Positive = 16
    """In place of `max_new_tokens` with experts on the disk."""
    batch_new_tokens: Positive = 16
    """In place of `max_new_tokens` in the sweep of batches."""
    part_minutes: PositiveFloat | None = None
    """As `bench.part_minutes`, of the greedy runs; with experts in memory, the other runs are cut by the same share."""
    temperatures: tuple[NonNegativeFloat, ...] = (0.0, 1.0)
    heads: tuple[Literal["eagle3", "mtp", "gto"], ...] = ("eagle3", "mtp", "gto")
    """Draft heads that `moexp reproduce` trains."""
    tables: tuple[Positive, ...] = ()
    """Those that `moexp reproduce` measures; none: it leaves heads and predictor out as well."""


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
    """`moexp tune`: the grid for K, tau, B and how much is prefetched, on prompts that no table uses."""

    max_draft: tuple[Positive, ...] = (2, 3, 4, 5, 6)
    tau: tuple[Share, ...] = (0.3, 0.5, 0.7, 0.85)
    budget: tuple[NonNegative, ...] = (30, 60, 90)
    prefetch_top: tuple[Positive | None, ...] = (None,)
    """Predicted experts a layer that are prefetched, by descending gate; null: all top-k."""
    prompts: Positive = 5
    max_new_tokens: Positive = 64


class SimulationSection(Section):
    """What `moexp reproduce` simulates from the routing that its tables recorded."""

    platforms: tuple[str, ...] = ("cg", "mn", "this-machine")
    """Names of `moexp platforms`, or files; none: it neither calibrates nor simulates."""
    sweeps: tuple[str, ...] = ("bandwidth", "cache")
    """Names of shipped sweeps, or files."""
