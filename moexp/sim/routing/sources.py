"""Where the routing of a simulation comes from: a recording, or a plain trace with assumed acceptance."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.data.traces import MANIFEST, RoutingGeometry, read_trace
from moexp.runtime.recording.files import find_recording, read_recording
from moexp.sim.routing.blocks import Blocks, fixed_methods, recorded_blocks
from moexp.sim.routing.traced import traced_blocks

TRACED = "traced"  # the drafter of a trace, where none was run


@dataclass(frozen=True)
class Source:
    """Where routing comes from.

    Attributes:
        path: a recording (file or folder), or the folder of a trace.
        method: of a recording, the method whose blocks are cut; "": the draft experts', or else the first that can be.
        acceptance: of a trace, the assumed probabilities (see `traced_blocks`); None: all are accepted.
        max_draft: of a trace, drafts a block.
        tokens: of a trace, at most so many; None: all.
    """

    path: Path
    method: str = ""
    acceptance: tuple[float, ...] | None = None
    max_draft: int = 4
    tokens: int | None = None

    @property
    def is_trace(self) -> bool:
        """Whether it is a plain trace."""
        return (self.path / MANIFEST).exists()

    def fingerprint(self) -> str:
        """Sixteen hex digits over the file that the routing is read from."""
        file = self.path / MANIFEST if self.is_trace else find_recording(self.path)
        if not file.is_file():
            raise MoexpError("no recording and no trace", where=str(self.path))
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


@dataclass(frozen=True)
class Routing:
    """The content of a source, before it is cut to layers.

    Attributes:
        expert_bytes: moved for each expert where it was recorded; 0: not known (a trace).
        drafter: label of the method, or `TRACED`.
    """

    source: Source
    geometry: RoutingGeometry
    expert_bytes: int
    drafter: str
    notes: tuple[str, ...]

    def blocks(self, layers: int | None = None) -> Blocks:
        """The blocks, for so many MoE layers (None: as recorded)."""
        source = self.source
        if not source.is_trace:
            return recorded_blocks(read_recording(source.path), self.drafter, layers)
        trace = read_trace(source.path)
        return traced_blocks(trace, source.acceptance, source.max_draft, tokens=source.tokens, layers=layers)


def open_source(source: Source) -> Routing:
    """The routing of a source.

    Raises:
        MoexpError: neither a recording nor a trace, or nothing in it that can be cut.
    """
    if source.is_trace:
        return Routing(source, read_trace(source.path).geometry, 0, TRACED, (_assumed(source.acceptance),))
    recording = read_recording(source.path)
    usable = fixed_methods(recording)
    if not usable:
        raise MoexpError("nothing that drafts chains of fixed length is recorded", where=str(source.path))
    label = source.method or next(
        (each for each in usable if recording.info.methods[each]["drafter"] == "draft-expert"), usable[0]
    )
    if label not in usable:
        raise MoexpError(f"no method {label!r} that can be cut", where=str(source.path), valid=", ".join(usable))
    return Routing(source, recording.info.geometry, int(recording.info.store["moved_bytes"]), label, ())


def _assumed(acceptance: Sequence[float] | None) -> str:
    if acceptance is None:
        return "No drafter was run: every draft is accepted and routed as the target routes it (oracle, a bound)."
    chances = ", ".join(f"{chance:g}" for chance in acceptance)
    return (
        f"No drafter was run: acceptance by place is assumed ({chances}), drafts are routed as the target routes them."
    )
