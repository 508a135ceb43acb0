"""What a run folder of EcoSpec's measurements holds, and the names in its records. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moexp import metrics
from moexp.metrics import Ratio
from moexp.records import StepRecord
from moexp.tables.core.rows import Bootstrapped
from moexp.tables.core.run import ArmRecords, Measured, load_measured, read_json

AR, DRAFT_EXPERT, GTO = "ar", "draft-expert", "GTO"
ECOSPEC, GLOBAL, ORACLE, CHEAPEST, EPSILON = "EcoSpec", "global", "oracle", "cheapest", "epsilon"
T0, T1, GAMMA, BATCH = "t0", "t1", "gamma-", "batch-"
TARGET = "ecospec_target.json"
PLATFORMS = ("resident", "local-disk")
"""Where the experts are while EcoSpec is measured: in memory, whose traffic then is the cost, or cold on a disk."""


def method_name(drafter: str, strategy: str) -> str:
    """A method's label: its drafter, and the selection unless it is by confidence."""
    return f"{drafter} + {strategy}" if strategy else drafter


def parts_of(label: str) -> tuple[str, str]:
    """The drafter and the selection of a label ("confidence" for the baseline)."""
    drafter, _, strategy = label.partition(" + ")
    return drafter, strategy or "confidence"


@dataclass
class EcoRun(Bootstrapped):
    """What a run folder holds of one platform.

    Attributes:
        platform: of `PLATFORMS`.
        target: geometry and sizes.
        by_temperature: the main runs.
        by_gamma: the sweep, the main run's own gamma included.
        by_batch: by number of requests decoded together.
        samples: of the bootstrap.
    """

    platform: str
    target: dict[str, Any]
    by_temperature: dict[float, Measured] = field(default_factory=dict)
    by_gamma: dict[int, Measured] = field(default_factory=dict)
    by_batch: dict[int, Measured] = field(default_factory=dict)
    samples: int = 2000


def load_eco_runs(folder: Path, samples: int = 2000) -> list[EcoRun]:
    """A run folder by platform; a single empty one where nothing is measured yet."""
    found = [platform for platform in PLATFORMS if (folder / platform).is_dir()]
    return [load_eco_run(folder, samples, platform) for platform in found or PLATFORMS[:1]]


def load_eco_run(folder: Path, samples: int = 2000, platform: str = PLATFORMS[0]) -> EcoRun:
    """One platform of a run folder; what is not measured yet is left out."""
    run = EcoRun(platform, read_json(folder / TARGET) or {}, samples=samples)
    folder = folder / platform
    for temperature, place in ((0.0, T0), (1.0, T1)):
        found = _load_part(folder / place)
        if found is not None:
            run.by_temperature[temperature] = found
    for prefix, kept in ((GAMMA, run.by_gamma), (BATCH, run.by_batch)):
        for path in sorted(folder.glob(f"{prefix}*")):
            found = _load_part(path)
            if found is not None:
                kept[int(path.name.removeprefix(prefix))] = found
    if 0.0 in run.by_temperature and "gamma" in run.target:
        run.by_gamma[int(run.target["gamma"])] = run.by_temperature[0.0]
    return run


def _load_part(folder: Path) -> Measured | None:
    """One part's records, its methods in the order in which they were asked for, whichever was the first to end."""
    found = load_measured(folder)
    if found is None:
        return None
    asked = {method["name"]: place for place, method in enumerate(found.settings.get("methods", ()))}
    found.arms = dict(sorted(found.arms.items(), key=lambda one: asked.get(one[0], len(asked))))
    return found


def nodes_verified(arm: ArmRecords) -> Ratio:
    """Rows of a verification step, the pending token included."""
    return metrics.pooled(Ratio(step.drafted + 1, 1) for step in arm.steps)


def predict_time(arm: ArmRecords) -> Ratio:
    """Seconds of a predictor of its own, a cycle."""
    return metrics.pooled(Ratio(step.predict_s, 1) for step in arm.steps if step.predict_s is not None)


def bytes_moved(arm: ArmRecords) -> Ratio:
    """Bytes that the store read, a cycle."""
    return metrics.pooled(Ratio(step.store["read_bytes"], 1) for step in arm.steps if "read_bytes" in step.store)


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
