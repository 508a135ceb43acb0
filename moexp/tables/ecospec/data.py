"""What a run folder of EcoSpec's measurements holds, and the names in its records. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moexp.metrics import Ratio
from moexp.records import StepRecord
from moexp.tables.core.rows import Bootstrapped
from moexp.tables.core.run import ArmRecords, Measured, load_measured, read_json

AR, DRAFT_EXPERT, GTO = "ar", "draft-expert", "GTO"
CONFIDENCE, ECOSPEC, GLOBAL, ORACLE, CHEAPEST, EPSILON = (
    "confidence", "EcoSpec", "global", "oracle", "cheapest", "epsilon",
)  # fmt: skip
"""Selections; by confidence is the baseline, which labels do not name."""
T0, T1, GAMMA, BATCH = "t0", "t1", "gamma-", "batch-"
TARGET = "ecospec_target.json"
PLATFORMS = ("resident", "local-disk")
"""Where the experts are while EcoSpec is measured: in memory, whose traffic then is the cost, or cold on a disk."""


def method_name(drafter: str, strategy: str) -> str:
    """A method's label: its drafter, and the selection unless it is by confidence."""
    return f"{drafter} + {strategy}" if strategy else drafter


def parts_of(label: str) -> tuple[str, str]:
    """The drafter and the selection of a label."""
    drafter, _, strategy = label.partition(" + ")
    return drafter, strategy or CONFIDENCE


@dataclass
class EcoRun(Bootstrapped):
    """What a run folder holds of one platform.

    Attributes:
        platform: of `PLATFORMS`.
        folder: of all platforms.
        target: geometry and sizes.
        by_temperature: the main runs.
        by_gamma: the sweep, the main run's own gamma included.
        by_batch: by number of requests decoded together.
    """

    platform: str
    folder: Path
    target: dict[str, Any]
    by_temperature: dict[float, Measured] = field(default_factory=dict)
    by_gamma: dict[int, Measured] = field(default_factory=dict)
    by_batch: dict[int, Measured] = field(default_factory=dict)

    @property
    def greedy(self) -> Measured | None:
        """The main run at T = 0."""
        return self.by_temperature.get(0.0)


def load_eco_runs(folder: Path, samples: int = 2000) -> list[EcoRun]:
    """A run folder by platform; a single empty one where nothing is measured yet."""
    platforms = [platform for platform in PLATFORMS if (folder / platform).is_dir()]
    return [load_eco_run(folder, samples, platform) for platform in platforms or PLATFORMS[:1]]


def load_eco_run(folder: Path, samples: int = 2000, platform: str = PLATFORMS[0]) -> EcoRun:
    """One platform of a run folder; what is not measured yet is left out."""
    run = EcoRun(platform, folder, read_json(folder / TARGET) or {}, samples=samples)
    for path in sorted((folder / platform).glob("*")):
        measured = _load_part(path)
        if measured is None:
            continue
        if path.name in (T0, T1):
            run.by_temperature[1.0 if path.name == T1 else 0.0] = measured
        for prefix, by_size in ((GAMMA, run.by_gamma), (BATCH, run.by_batch)):
            if path.name.startswith(prefix):
                by_size[int(path.name.removeprefix(prefix))] = measured
    if run.greedy is not None and "gamma" in run.target:
        run.by_gamma[int(run.target["gamma"])] = run.greedy
    return run


def _load_part(folder: Path) -> Measured | None:
    """One part's records, its methods in the order of the settings, whichever was the first to end."""
    measured = load_measured(folder)
    if measured is not None:
        order = {method["name"]: rank for rank, method in enumerate(measured.settings.get("methods", ()))}
        measured.arms = dict(sorted(measured.arms.items(), key=lambda arm: order.get(arm[0], len(order))))
    return measured


def batch_cycles(arms: Iterable[ArmRecords]) -> list[StepRecord]:
    """One record a cycle of each batch: times and unions of a batch stand in the record of each of its requests."""
    first: dict[tuple[int, int, float], StepRecord] = {}
    for arm in arms:
        for step in arm.steps:
            first.setdefault((step.cycle, step.batch or 1, step.cycle_s), step)
    return list(first.values())


def batch_rate(arms: Collection[ArmRecords]) -> Ratio:
    """Tokens of all requests over the seconds of their batches."""
    return Ratio(sum(arm.request.new_tokens for arm in arms), sum(step.cycle_s for step in batch_cycles(arms)))
