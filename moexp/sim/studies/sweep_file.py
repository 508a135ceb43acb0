"""The YAML of `moexp simulate --sweep`: grids of settings, and the points that they span.

    platform: cg
    recording: runs/pocket/resident      # by default the recipe's; or trace: a folder, with acceptance: [0.8, 0.6]
    max_draft: [2, 4]
    tau: [0.3, 0.5]
    cache: [none, lru]
    cache_experts: [null, 256]

Every list is a grid.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, model_validator

from moexp.base.yamlio import read_yaml
from moexp.config.recipe import find_named, recipe_folders
from moexp.config.section import NonNegative, Positive, PositiveFloat, Section, Share
from moexp.sim.routing.blocks import Setting
from moexp.sim.routing.sources import Source
from moexp.sim.sections import check_keys, parse_section

T = TypeVar("T")
Grid = Annotated[tuple[T, ...], Field(min_length=1)]
Cache = Literal["none", "lru", "lfu", "least-stale", "static-hot", "belady"]


class SweepSection(Section):
    """A sweep. Lists are grids: every combination is simulated, and AR for each machine."""

    recording: str | None = None
    """A recording, or the folder it is in; paths start where the command runs. Without a trace, null is the recipe's
    resident run."""
    trace: str | None = None
    """A folder of `moexp trace-routing`, in place of a recording."""
    method: str = ""
    """Of a recording, the method whose blocks are cut; empty: the draft experts'."""
    acceptance: tuple[Share, ...] | None = None
    """Of a trace, the assumed acceptance by position in the block; null: all are accepted."""
    tokens: Positive | None = None
    """Of a trace, at most so many tokens."""
    platform: str
    model: str | None = None
    """Of those that the platform has constants for; null: its first."""
    max_draft: Grid[Positive] = (4,)
    policy: Grid[Literal["fixed", "confidence", "confidence-expansion"]] = ("confidence-expansion",)
    tau: Grid[Share] = (0.5,)
    budget: Grid[NonNegative | Literal["cache"]] = (60,)
    prefetch: Grid[bool] = (True,)
    prefetch_top: Grid[Positive | None] = (None,)
    """Predicted experts a layer that are prefetched; null: all top-k."""
    cache: Grid[Cache] = ("none",)
    cache_experts: Grid[Positive | None] = (None,)
    """Slots; null: the platform's."""
    bandwidth_gb_s: Grid[PositiveFloat | None] = (None,)
    """Of the link; null: the platform's."""
    workers: NonNegative = 0
    """Processes; 0: one a core."""

    @model_validator(mode="after")
    def _one_source(self) -> SweepSection:
        if self.recording is not None and self.trace is not None:
            raise ValueError("recording or trace, not both")
        return self

    def with_default(self, recording: Path) -> SweepSection:
        """The same from this recording, if it names neither a recording nor a trace."""
        named = self.recording is not None or self.trace is not None
        return self if named else self.model_copy(update={"recording": str(recording)})

    def source(self) -> Source:
        """Where the routing comes from; recording or trace must be named."""
        path = Path(self.recording or self.trace or "")
        return Source(path, self.method, self.acceptance, max(self.max_draft), self.tokens)


class MachinePoint(NamedTuple):
    """The coordinates that AR depends on, too."""

    cache: str
    cache_experts: int | None
    bandwidth_gb_s: float | None


class Part(NamedTuple):
    """The unit of work of a process: a machine, AR on it, and every setting."""

    machine: MachinePoint
    settings: tuple[Setting, ...]

    @property
    def digest(self) -> str:
        """Names its file."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def find_sweep(name_or_path: str | Path) -> Path:
    """The file of a sweep given by path, or by name among those shipped.

    Raises:
        MoexpError: neither.
    """
    known = {file.stem: file for folder in recipe_folders() for file in sorted((folder / "sweeps").glob("*.yaml"))}
    return find_named(name_or_path, known, "sweep", where="--sweep")


def load_sweep(path: Path) -> SweepSection:
    """Reads a sweep.

    Raises:
        MoexpError: not such a file, an unknown key (naming the nearest), or a bad value.
    """
    values = read_yaml(path)
    check_keys(values, SweepSection.model_fields, str(path), what="a sweep")
    return parse_section(SweepSection, values, str(path))


def parts_of(sweep: SweepSection) -> list[Part]:
    """All points of a sweep, by machine; of settings that do the same, one."""
    settings = tuple(dict.fromkeys(_plain(*each) for each in itertools.product(
        sweep.max_draft, sweep.policy, sweep.tau, sweep.budget, sweep.prefetch, sweep.prefetch_top
    )))  # fmt: skip
    machines = itertools.product(sweep.cache, sweep.cache_experts, sweep.bandwidth_gb_s)
    return [Part(MachinePoint(*each), settings) for each in machines]


def _plain(
    max_draft: int, policy: str, tau: float, budget: int | str, prefetch: bool, prefetch_top: int | None
) -> Setting:
    default: dict[str, Any] = {"max_draft": max_draft, "policy": policy, "prefetch": prefetch}
    if policy != "fixed":
        default["tau"] = tau
    if policy == "confidence-expansion":
        default["budget"] = budget
    if prefetch:
        default["prefetch_top"] = prefetch_top
    return Setting(**default)
