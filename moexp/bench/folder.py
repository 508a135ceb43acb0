"""The folder of one run on one platform, and how a run that was cut off goes on.

It holds `settings.json` (what was measured), `provenance.json`, `probe.json` (of the platform), `steps.jsonl`,
`requests.jsonl` and `routing.parquet` (every demand on the store; not of batches), and `probes.jsonl` where the
machine was probed on the way. The request is the unit of resuming: its steps are written first and its record last, so
a pair (prompt, method) is either complete or measured again, with those whose turn it shared.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.base.provenance import collect_provenance
from moexp.records import RequestRecord, StepRecord, read_records
from moexp.runtime.recording.files import ROUTING
from moexp.runtime.recording.recorder import PARTS
from moexp.tables.core.run import (
    NEW_TOKENS,
    PROBE,
    PROBES,
    PROVENANCE,
    REQUESTS,
    SETTINGS,
    STEPS,
    invocations,
    read_json,
)

FEWEST_TOKENS = 4


def begin_run(folder: Path, settings: dict[str, Any]) -> set[tuple[int, str]]:
    """Readies a run's folder for `settings` (plain JSON); returns the complete pairs (request, method).

    Records of other settings do not mix with these: the old files are renamed to `*.old`, one generation of them stays.
    Steps of a request that was cut off are dropped.
    """
    settings = json.loads(json.dumps(settings))
    earlier = dict(read_json(folder / SETTINGS) or {})
    earlier.pop(NEW_TOKENS, None)
    if earlier != settings:
        for name in (SETTINGS, PROBE, PROBES, PROVENANCE, STEPS, REQUESTS, ROUTING):
            if (folder / name).exists():
                (folder / name).replace(folder / f"{name}.old")
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        atomic.write_json(folder / SETTINGS, settings)
        return set()
    done = {(record.request, record.method) for record in _resumed(folder / REQUESTS, RequestRecord)}
    steps = list(_resumed(folder / STEPS, StepRecord))
    complete = [step for step in steps if (step.request, step.method) in done]
    if len(complete) < len(steps):
        lines = [json.dumps(dataclasses.asdict(step), separators=(",", ":")) + "\n" for step in complete]
        atomic.write_text(folder / STEPS, "".join(lines))
    return done


def add_provenance(folder: Path, seed: int) -> None:
    """Adds this invocation to those that had a part in the folder's records."""
    atomic.write_json(folder / PROVENANCE, {"invocations": [*invocations(folder), collect_provenance(seed)]})


def fitting_tokens(warmed: Sequence[RequestRecord], prompts: int, seconds: float, most: int) -> int:
    """New tokens a prompt that let a run end in time: at most `most`, at least the fewest that say something.

    Args:
        warmed: a warm-up's records, of all methods that will run.
        prompts: that each of them is to decode.
        seconds: that the run may take, prefills included.
    """
    token_s = prefill_s = 0.0
    for method in {record.method for record in warmed}:
        records = [record for record in warmed if record.method == method]
        token_s += sum(record.decode_s for record in records) / max(1, sum(record.new_tokens for record in records))
        prefill_s += sum(record.prefill_s for record in records) / len(records)
    if not token_s or not prompts:
        return most
    return max(min(most, FEWEST_TOKENS), min(most, int((seconds / prompts - prefill_s) / token_s)))


def settled_tokens(folder: Path) -> int | None:
    """New tokens a prompt that the folder's run settled on; None: it has not, or does not."""
    return (read_json(folder / SETTINGS) or {}).get(NEW_TOKENS)


def settle_tokens(folder: Path, tokens: int) -> int:
    """Keeps how many new tokens a prompt the run settled on, for it to be resumed with them."""
    atomic.write_json(folder / SETTINGS, {**(read_json(folder / SETTINGS) or {}), NEW_TOKENS: tokens})
    return tokens


def _resumed(path: Path, kind: type[Any]) -> Iterable[Any]:
    return read_records(path, kind, resuming=True) if path.exists() else ()
