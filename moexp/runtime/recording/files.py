"""A recorded run on disk: all that its decoding asked of the expert store, in order, as `routing.parquet`.

A row is one event: a step through the layers, or a prefetch outside of one. Columns:

    event int64            running number over the whole run
    session int32          which opening of the store; caches do not outlive it
    request int32, workload, method, cycle int32   whose it is; request -1: warm-up; cycle -1: prefill
    phase                  draft, verify, ar, prefill: a step; prefetch: experts of one token, announced
    rows int16             live rows B
    top_r, draft_experts, prefetch, prefetch_top   the step's path (`moexp.runtime.engine.moe.StepPath`); null: all
    confidence float       of a draft step whose token was kept
    accepted, emitted      of the step that ends a cycle
    routing list<int16>    L x B x k expert ids, by layer, row and descending gate (prefetch: L x 1 x announced)

The file's metadata says what it is of. Shapes: L MoE layers, B live rows, k experts a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.data.traces import RoutingGeometry

FORMAT = "moexp-recording-1"
ROUTING = "routing.parquet"
PREFETCH = "prefetch"  # the phase of an event that is not a step
VALID = "a routing.parquet that a benchmark wrote"

SCHEMA = pa.schema(
    [
        ("event", pa.int64()),
        ("session", pa.int32()),
        ("request", pa.int32()),
        ("workload", pa.string()),
        ("method", pa.string()),
        ("cycle", pa.int32()),
        ("phase", pa.string()),
        ("rows", pa.int16()),
        ("top_r", pa.int16()),
        ("draft_experts", pa.bool_()),
        ("prefetch", pa.bool_()),
        ("prefetch_top", pa.int16()),
        ("confidence", pa.float64()),
        ("accepted", pa.int16()),
        ("emitted", pa.int16()),
        ("routing", pa.list_(pa.int16())),
    ]
)


@dataclass(frozen=True)
class RecordingInfo:
    """What a recording is of.

    Attributes:
        target: fingerprint of the checkpoint.
        geometry: what the ids mean.
        store: how it was set up: kind, policy, capacity (experts; None: no limit), expert_bytes, moved_bytes (asked of
            the device an expert, on average), pieces (in which it comes), and what else its section says.
        methods: label -> the method's settings.
    """

    target: str
    geometry: RoutingGeometry
    store: dict[str, Any]
    methods: dict[str, dict[str, Any]]

    def metadata(self) -> dict[str, str]:
        """For the file."""
        return {"format": FORMAT, "recording": json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """One event; see the module's text. `routing` is [L, B, k]."""

    phase: str
    routing: np.ndarray
    top_r: int | None = None
    draft_experts: bool = False
    prefetch: bool = False
    prefetch_top: int | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class RecordedCycle:
    """The events of one cycle in order. A prefill chunk is a cycle of its own, numbered -1, that emits nothing."""

    session: int
    request: int
    workload: str
    method: str
    cycle: int
    accepted: int
    emitted: int
    passes: list[RecordedPass] = field(default_factory=list)

    @property
    def drafts(self) -> list[RecordedPass]:
        """Its draft steps."""
        return [one for one in self.passes if one.phase == "draft"]


@dataclass(frozen=True)
class Recording:
    """A recording in memory."""

    info: RecordingInfo
    cycles: list[RecordedCycle]

    def of_method(self, label: str) -> list[RecordedCycle]:
        """Decoding cycles of a method's requests, warm-up left out."""
        return [one for one in self.cycles if one.method == label and one.request >= 0 and one.cycle >= 0]


def find_recording(location: Path) -> Path:
    """The file of a recording given by its path or its folder."""
    return location / ROUTING if location.is_dir() else location


def read_recording(location: Path) -> Recording:
    """The recording in a file, or in a folder's `routing.parquet`.

    Raises:
        MoexpError: there is none, or it is cut, damaged or something else.
    """
    path = find_recording(location)
    try:
        info, table = read_table(path)
        return Recording(info, list(_cycles(table, info.geometry)))
    except FileNotFoundError as error:
        raise MoexpError("no recording", where=str(path), valid=VALID) from error
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, IndexError) as error:
        raise MoexpError("not a recording, or a damaged one", where=str(path), valid=VALID) from error


def read_table(path: Path) -> tuple[RecordingInfo, pa.Table]:
    """What a file says it is of, and its rows; ValueError where it is not a recording."""
    table = pq.read_table(path, memory_map=False)
    metadata = table.schema.metadata or {}
    if metadata.get(b"format") != FORMAT.encode() or not table.schema.equals(SCHEMA):
        raise ValueError(f"not {FORMAT}")
    values = json.loads(metadata[b"recording"])
    geometry = RoutingGeometry.from_json(values.pop("geometry"))
    return RecordingInfo(geometry=geometry, **values), table


def write_table(path: Path, info: RecordingInfo, table: pa.Table) -> None:
    """Writes rows, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(info.metadata()), sink, compression="zstd")
    atomic.write_bytes(path, sink.getvalue().to_pybytes())


def _cycles(table: pa.Table, geometry: RoutingGeometry) -> Iterator[RecordedCycle]:
    layers = len(geometry.layers)
    routing = table.column("routing").combine_chunks()
    ids, ends = routing.flatten().to_numpy(), np.cumsum(routing.value_lengths().to_numpy())
    if len(ids) and not 0 <= ids.min() <= ids.max() < geometry.num_experts:
        raise ValueError("ids of other experts")
    plain = {name: table.column(name).to_pylist() for name in SCHEMA.names if name != "routing"}
    passes: list[RecordedPass] = []
    begin = 0
    for n, end in enumerate(ends.tolist()):
        phase = plain["phase"][n]
        passes.append(
            RecordedPass(
                phase,
                ids[begin:end].reshape(layers, plain["rows"][n], -1),
                plain["top_r"][n],
                plain["draft_experts"][n],
                plain["prefetch"][n],
                plain["prefetch_top"][n],
                plain["confidence"][n],
            )
        )
        begin = end
        if phase in ("verify", "ar", "prefill"):
            yield RecordedCycle(
                plain["session"][n],
                plain["request"][n],
                plain["workload"][n],
                plain["method"][n],
                plain["cycle"][n],
                plain["accepted"][n] or 0,
                plain["emitted"][n] or 0,
                passes,
            )
            passes = []
    if passes:
        raise ValueError("ends inside a cycle")
