"""Routing traces on disk: which experts every MoE layer chose for every token, as Parquet shards with a manifest.

A trace is a folder of `shard-00000.parquet`, ... and `manifest.json`. Columns of a shard, a row a token:

    sample int32, position int32, token int32      which text, where in it, and the token's id
    experts  fixed-size list of L x k ids          by layer, then by descending gate (ties by lower id); uint8 or uint16
    gates    fixed-size list of L x k float16      optional, in the same order

The shards alone are an ordinary data set: `datasets.load_dataset("parquet", data_files="trace/*.parquet")`.

Shapes: T tokens, L MoE layers, k experts a token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moexp.base.atomic import write_bytes, write_json
from moexp.base.errors import MoexpError

FORMAT = "moexp-routing-trace-1"
MANIFEST = "manifest.json"
WRITER = "a folder written by `moexp trace-routing`"


@dataclass(frozen=True)
class RoutingGeometry:
    """What expert ids mean: decoder layers that route, experts a layer, experts a token."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def id_type(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds an expert id."""
        return np.dtype(np.uint8 if self.num_experts <= 1 << 8 else np.uint16)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RoutingGeometry:
        """From a manifest or a header; KeyError or TypeError where a key is missing."""
        return cls(tuple(value["layers"]), value["num_experts"], value["top_k"])


@dataclass(frozen=True)
class TraceShard:
    """Some tokens of a trace, in order. `gates_TLk` is None where none were stored."""

    sample_T: np.ndarray
    position_T: np.ndarray
    token_T: np.ndarray
    experts_TLk: np.ndarray
    gates_TLk: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token_T)


@dataclass(frozen=True)
class ShardEntry:
    """A shard in the manifest. `text` is a hash of its token ids: what it was traced over."""

    file: str
    tokens: int
    samples: int
    bytes: int
    sha256: str
    text: str


@dataclass
class TraceManifest:
    """What a trace is of. `identity` hashes all that decides its bytes but the text (see `ShardEntry.text`)."""

    target: str
    model_type: str
    geometry: RoutingGeometry
    gates: bool
    source: str
    identity: str
    shards: list[ShardEntry] = field(default_factory=list)
    complete: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Writes `manifest.json` atomically."""
        counts = {"tokens": self.tokens, "samples": self.samples}
        write_json(folder / MANIFEST, {"format": FORMAT, **counts, **asdict(self)})


@dataclass(frozen=True)
class Trace:
    """A trace that has been checked."""

    folder: Path
    manifest: TraceManifest

    @property
    def geometry(self) -> RoutingGeometry:
        return self.manifest.geometry

    def shards(self) -> Iterator[TraceShard]:
        """The shards in order, one in memory at a time."""
        for entry in self.manifest.shards:
            yield _load_shard(self.folder / entry.file, self.manifest)


def shard_file(number: int) -> str:
    """The name of shard `number`."""
    return f"shard-{number:05d}.parquet"


def text_hash(token_T: np.ndarray) -> str:
    """A short hash of token ids."""
    return hashlib.sha256(np.ascontiguousarray(token_T, dtype="<i4").tobytes()).hexdigest()[:16]


def write_shard(folder: Path, number: int, shard: TraceShard, manifest: TraceManifest) -> ShardEntry:
    """Writes a shard atomically; the same tokens give the same bytes."""
    geometry = manifest.geometry
    per_token = len(geometry.layers) * geometry.top_k
    columns = {
        "sample": pa.array(shard.sample_T.astype(np.int32)),
        "position": pa.array(shard.position_T.astype(np.int32)),
        "token": pa.array(shard.token_T.astype(np.int32)),
        "experts": _list_column(shard.experts_TLk.astype(geometry.id_type), per_token),
    }
    if shard.gates_TLk is not None:
        columns["gates"] = _list_column(shard.gates_TLk.astype(np.float16), per_token)
    table = pa.table(columns).replace_schema_metadata(_metadata(manifest))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data = sink.getvalue().to_pybytes()
    write_bytes(folder / shard_file(number), data)
    return ShardEntry(
        file=shard_file(number),
        tokens=len(shard),
        samples=len(np.unique(shard.sample_T)),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        text=text_hash(shard.token_T),
    )


def read_manifest(folder: Path) -> TraceManifest:
    """The manifest of a trace, finished or not; MoexpError where there is none that can be read."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text())
        if values.pop("format") != FORMAT:
            raise ValueError(f"not {FORMAT}")
        values.pop("tokens"), values.pop("samples")
        geometry = RoutingGeometry.from_json(values.pop("geometry"))
        shards = [ShardEntry(**entry) for entry in values.pop("shards")]
        return TraceManifest(geometry=geometry, shards=shards, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoexpError("no readable trace manifest", where=str(path), valid=WRITER) from error


def read_trace(folder: Path, fingerprint: str | None = None) -> Trace:
    """Opens a trace and checks all of it.

    Raises:
        MoexpError: no finished trace, another target than that of this `fingerprint` (`target_identity`), or a shard
            that is missing or changed.
    """
    manifest = read_manifest(folder)
    if fingerprint is not None and manifest.target != fingerprint:
        raise MoexpError(
            f"a trace of target {manifest.target[:12]}, but the target is {fingerprint[:12]}",
            where=str(folder),
            valid="a trace of this very target",
        )
    if not manifest.complete:
        raise MoexpError("the trace is not finished", where=str(folder), valid="run trace-routing again to resume")
    for entry in manifest.shards:
        problem = shard_problem(folder, entry)
        if problem:
            raise MoexpError(f"trace shard {entry.file} {problem}", where=str(folder), valid="trace again")
    return Trace(folder, manifest)


def expert_counts(shards: Iterable[TraceShard], geometry: RoutingGeometry) -> np.ndarray:
    """How many tokens use each expert, int64 [L, E]."""
    counts_LE = np.zeros((len(geometry.layers), geometry.num_experts), dtype=np.int64)
    for shard in shards:
        for counts_E, used_Tk in zip(counts_LE, shard.experts_TLk.swapaxes(0, 1), strict=True):
            counts_E += np.bincount(used_Tk.ravel(), minlength=geometry.num_experts)
    return counts_LE


def expert_demands(trace: Trace) -> dict[tuple[int, int], float]:
    """How many tokens of a trace use each expert, by (decoder layer, expert)."""
    counts_LE = expert_counts(trace.shards(), trace.geometry)
    return {(trace.geometry.layers[row], expert): float(count) for (row, expert), count in np.ndenumerate(counts_LE)}


def shard_problem(folder: Path, entry: ShardEntry) -> str:
    """What is wrong with a shard's file, or nothing."""
    path = folder / entry.file
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"has {size} bytes where the manifest says {entry.bytes}"
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return "" if digest == entry.sha256 else "is not the one that the manifest names (sha256)"


def _metadata(manifest: TraceManifest) -> dict[str, str]:
    """Stored in each shard too."""
    return {"format": FORMAT, "target": manifest.target, "geometry": json.dumps(asdict(manifest.geometry))}


def _list_column(values: np.ndarray, per_token: int) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), per_token)


def _load_shard(path: Path, manifest: TraceManifest) -> TraceShard:
    shape = (-1, len(manifest.geometry.layers), manifest.geometry.top_k)
    try:
        table = pq.read_table(path)
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        lists = {
            name: columns[name].flatten().to_numpy(zero_copy_only=False).reshape(shape)
            for name in ("experts", "gates")
            if name in columns
        }
        return TraceShard(
            sample_T=columns["sample"].to_numpy(),
            position_T=columns["position"].to_numpy(),
            token_T=columns["token"].to_numpy(),
            experts_TLk=lists["experts"],
            gates_TLk=lists.get("gates"),
        )
    except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
        raise MoexpError("not a shard of a routing trace", where=str(path), valid=WRITER) from error
