"""Recording a run's routing, so that the simulator can walk it again (format: moexp/runtime/recording/files.py).

While a request decodes, arrays are only set aside; at its end they are written as one part. Parts become one
`routing.parquet` when the run closes, or when it is resumed. The engine decodes one request at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from moexp.base.errors import MoexpError
from moexp.records import StepRecord
from moexp.runtime.recording.files import (
    PREFETCH,
    ROUTING,
    SCHEMA,
    VALID,
    RecordedPass,
    RecordingInfo,
    read_table,
    write_table,
)

if TYPE_CHECKING:
    from moexp.runtime.engine.moe import StepPath

PARTS = "routing.parts"
WARMUP = -1  # the request that warm-up counts as


class PassLog:
    """An `EngineObserver` that holds what it receives, in order, until `take`."""

    def __init__(self) -> None:
        self._passes: list[tuple[StepPath | None, Sequence[np.ndarray]]] = []

    def passed(self, path: StepPath, routings: list[list[np.ndarray]]) -> None:
        """See `EngineObserver`."""
        self._passes += [(path, routing) for routing in routings]

    def prefetched(self, routing_Lk: np.ndarray) -> None:
        """See `EngineObserver`."""
        self._passes.append((None, list(routing_Lk[:, None])))

    def clear(self) -> None:
        """Forget what was logged."""
        self._passes.clear()

    def take(self) -> list[RecordedPass]:
        """What was logged since the last call."""
        passes, self._passes = self._passes, []
        return [_recorded(path, np.stack(routing).astype(np.int16)) for path, routing in passes]


class Recorder:
    """Writes the recording of a run into its folder; a context manager.

    Args:
        folder: the platform's, beside `steps.jsonl`.
        info: what is recorded. A recording of something else that lies there is replaced.
        done: complete pairs (request, method); what was recorded of others is dropped.

    Attributes:
        log: the observer to give to every engine of the run.
    """

    def __init__(self, folder: Path, info: RecordingInfo, done: Collection[tuple[int, str]] = ()) -> None:
        self.log = PassLog()
        self._file, self._parts, self._info = folder / ROUTING, folder / PARTS, info
        table = self._merge(set(done))
        self._event = table.num_rows and pc.max(table.column("event")).as_py() + 1
        self._session = table.num_rows and pc.max(table.column("session")).as_py() + 1

    def keep(
        self,
        request: int,
        workload: str,
        method: str,
        steps: Sequence[StepRecord],
        passes: Sequence[RecordedPass] | None = None,
    ) -> None:
        """Ends a request.

        Args:
            request: `WARMUP` for what is not counted.
            steps: of its cycles, in order.
            passes: its own; None: everything logged since the last request.
        """
        rows = rows_of(self.log.take() if passes is None else passes, steps)
        for row in rows:
            row |= {"event": self._event, "session": self._session, "request": request}
            row |= {"workload": workload, "method": method}
            self._event += 1
        if rows:
            columns = [pa.array([row[field.name] for row in rows], field.type) for field in SCHEMA]
            part = self._parts / f"{rows[0]['event']:012d}.parquet"
            write_table(part, self._info, pa.Table.from_arrays(columns, schema=SCHEMA))

    def close(self) -> None:
        """Brings the parts together."""
        self._merge(None)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _merge(self, done: set[tuple[int, str]] | None) -> pa.Table:
        """Of all that lies in the folder, what is of this run and (unless None) of complete requests, in one file."""
        files = [self._file, *sorted(self._parts.glob("*.parquet"))]
        tables = [table for file in files if (table := self._read(file)) is not None]
        table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        events = table.column("event").to_numpy()
        # A kill between the writing of the file and the removal of the parts leaves rows in both.
        table = table.take(np.unique(events, return_index=True)[1])
        if done is not None:
            pairs = zip(table.column("request").to_pylist(), table.column("method").to_pylist(), strict=True)
            table = table.filter(pa.array([pair in done or pair[0] == WARMUP for pair in pairs], pa.bool_()))
        if tables:
            write_table(self._file, self._info, table)
        shutil.rmtree(self._parts, ignore_errors=True)
        return table

    def _read(self, file: Path) -> pa.Table | None:
        """The rows of a file of this very run; None where it is of another, or missing."""
        if not file.exists():
            return None
        try:
            info, table = read_table(file)
        except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
            valid = f"{VALID}; remove it to measure again without it"
            raise MoexpError("not a recording, or a damaged one", where=str(file), valid=valid) from error
        same = replace(info, methods={}) == replace(self._info, methods={})
        return table.replace_schema_metadata(None) if same else None


def rows_of(passes: Sequence[RecordedPass], steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Rows of one request's passes, each decoding step with what its record says of it.

    Raises:
        AssertionError: the passes are not those of the records.
    """
    rows = []
    cycle, draft = 0, 0
    for one in passes:
        ends = one.phase in ("verify", "ar")
        step = steps[cycle] if one.phase != "prefill" and cycle < len(steps) else None
        row = {
            "cycle": -1 if one.phase == "prefill" else cycle,
            "phase": one.phase,
            "rows": one.routing.shape[1],
            "top_r": one.top_r,
            "draft_experts": one.draft_experts,
            "prefetch": one.prefetch,
            "prefetch_top": one.prefetch_top,
            "confidence": None,
            "accepted": step.accepted if ends and step else None,
            "emitted": step.emitted if ends and step else None,
            "routing": one.routing.ravel(),
        }
        if one.phase == "draft" and step is not None:
            row["confidence"] = step.confidences[draft] if draft < len(step.confidences) else None
            draft += 1
        if ends:
            cycle, draft = cycle + 1, 0
        rows.append(row)
    assert cycle == len(steps), (cycle, len(steps))
    return rows


def _recorded(path: StepPath | None, routing_LBk: np.ndarray) -> RecordedPass:
    if path is None:
        return RecordedPass(PREFETCH, routing_LBk)
    return RecordedPass(path.phase, routing_LBk, path.top_r, path.draft_experts, path.prefetch, path.prefetch_top)
