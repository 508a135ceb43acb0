"""What a run folder keeps of one platform: settings, probes, and the records of every method and prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.records import RequestRecord, StepRecord, read_records
from moexp.tables.core.tags import MEASURED

SETTINGS, PROBE, PROBES, PROVENANCE = "settings.json", "probe.json", "probes.jsonl", "provenance.json"
STEPS, REQUESTS = "steps.jsonl", "requests.jsonl"
"""Files of one platform's folder."""

NEW_TOKENS = "new_tokens"  # in the settings: what a run with a time limit settled on, a prompt


@dataclass(frozen=True)
class ArmRecords:
    """What one method did with one prompt."""

    request: RequestRecord
    steps: list[StepRecord]


@dataclass
class Measured:
    """Everything that a run folder keeps of one platform.

    Attributes:
        settings: what was run (methods, prompts, store).
        probe: what a step costs without loading, and what the link carries.
        arms: method -> request -> what it did; complete requests only.
        provenance: every invocation that measured something.
    """

    name: str
    tag: str
    settings: dict[str, Any]
    probe: dict[str, Any]
    arms: dict[str, dict[int, ArmRecords]]
    provenance: list[dict[str, Any]]


def load_measured(folder: Path) -> Measured | None:
    """One platform's records; None where nothing is complete."""
    if not (folder / REQUESTS).exists():
        return None
    steps: dict[tuple[int, str], list[StepRecord]] = {}
    for step in read_records(folder / STEPS, StepRecord, resuming=True):
        steps.setdefault((step.request, step.method), []).append(step)
    arms: dict[str, dict[int, ArmRecords]] = {}
    for request in read_records(folder / REQUESTS, RequestRecord, resuming=True):
        cycles = steps.get((request.request, request.method), [])
        if sum(step.emitted for step in cycles) != request.new_tokens:
            raise MoexpError(
                f"steps of request {request.request} by {request.method} are missing or doubled", where=str(folder)
            )
        arms.setdefault(request.method, {})[request.request] = ArmRecords(request, cycles)
    if not arms:
        return None
    settings = read_json(folder / SETTINGS) or {}
    return Measured(
        name=folder.name,
        tag=str(settings.get("tag", MEASURED)),
        settings=settings,
        probe=read_json(folder / PROBE) or {},
        arms=arms,
        provenance=invocations(folder),
    )


def invocations(folder: Path) -> list[dict[str, Any]]:
    """Every invocation that had a part in a folder's records; empty where that is not recorded."""
    return list((read_json(folder / PROVENANCE) or {}).get("invocations", []))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    return atomic.read_json(path) if path.exists() else None
