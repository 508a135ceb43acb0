"""What a recipe may say: one frozen model a section, each field with its default and its unit.

`moexp/config/recipe.py` reads files into these; nothing else makes them from user input. A string is never taken
for a number (`strict`) and an unknown name is an error (`extra="forbid"`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moexp.config.bench import BenchSection, EcoSpecSection, EvalSection, SimulationSection, TuneSection
from moexp.config.decode import DecodeSection, PaceSection, StoreSection, TreeSection
from moexp.config.learn import DraftSection, HeadSection, LogitLossSection, LossSection, PredictorSection
from moexp.config.section import DType, NonNegative, Section
from moexp.config.target import (
    CarveSection,
    CorpusSection,
    DeltaSection,
    RepairSection,
    TargetSection,
    TinySection,
    TraceSection,
)

__all__ = [
    "BenchSection",
    "CarveSection",
    "CorpusSection",
    "DType",
    "DecodeSection",
    "DeltaSection",
    "DraftSection",
    "EcoSpecSection",
    "EvalSection",
    "HeadSection",
    "LogitLossSection",
    "LossSection",
    "PaceSection",
    "PathsSection",
    "PredictorSection",
    "RepairSection",
    "Section",
    "Sections",
    "SimulationSection",
    "StoreSection",
    "TargetSection",
    "TinySection",
    "TraceSection",
    "TreeSection",
    "TuneSection",
]


class PathsSection(Section):
    """Folders to use in place of those under `$MOEXP_HOME`; what `--out` sets."""

    target: str | None = None
    """Where the built target lies, or is to lie."""
    draft_experts: str | None = None
    predictor: str | None = None
    head: str | None = None
    """A published head to draft with: a folder or a hub id with an EAGLE-3 head, or (head.kind mtp) with the target's
    own checkpoint, whose layer for multi-token prediction it is."""


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
    simulation: SimulationSection = SimulationSection()
    paths: PathsSection = PathsSection()
