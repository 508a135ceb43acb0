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
import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from moexp.base.errors import MoexpError
from moexp.base.yamlio import read_yaml
from moexp.config.recipe import find_named, recipe_folders
from moexp.config.section import NonNegative, Positive, PositiveFloat, Section, Share
from moexp.sim.blocks import Setting
from moexp.sim.sources import Source

Cache = Literal["none", "lru", "lfu", "least-stale", "static-hot", "belady"]


class SweepSection(Section):
    """Everything that a sweep may say. Lists are grids: every combination is simulated, and AR for each machine."""

    recording: str | None = None
    """A recording, or the folder it is in; paths start where the command runs. Without a trace, null is the recipe's
    resident run."""
    trace: str | None = None
    """A folder of `moexp trace-routing`, in place of a recording."""
    method: str = ""
    """Of a recording, the method whose blocks are cut; empty: the draft experts'."""
    acceptance: tuple[Share, ...] | None = None
    """Of a trace, the assumed acceptance by place; null: all are accepted."""
    tokens: Positive | None = None
    """Of a trace, at most so many tokens."""
    platform: str
    model: str | None = None
    """Of those that the platform has constants for; null: its first."""
    max_draft: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4,)
    policy: Annotated[tuple[Literal["fixed", "confidence", "confidence-expansion"], ...], Field(min_length=1)] = (
        "confidence-expansion",
    )
    tau: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.5,)
    budget: Annotated[tuple[NonNegative | Literal["cache"], ...], Field(min_length=1)] = (60,)
    prefetch: Annotated[tuple[bool, ...], Field(min_length=1)] = (True,)
    prefetch_top: Annotated[tuple[Positive | None, ...], Field(min_length=1)] = (None,)
    """Predicted experts a layer that are prefetched; null: all top-k."""
    cache: Annotated[tuple[Cache, ...], Field(min_length=1)] = ("none",)
    cache_experts: Annotated[tuple[Positive | None, ...], Field(min_length=1)] = (None,)
    """Slots; null: the platform's."""
    bandwidth_gb_s: Annotated[tuple[PositiveFloat | None, ...], Field(min_length=1)] = (None,)
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
        """What the routing is read from; one of the two must be named."""
        place = Path(self.recording or self.trace or "")
        return Source(place, self.method, self.acceptance, max(self.max_draft), self.tokens)


class MachinePoint(NamedTuple):
    """What AR depends on, too."""

    cache: str
    cache_experts: int | None
    bandwidth_gb_s: float | None


class Part(NamedTuple):
    """What one worker simulates at a time: a machine, AR on it, and every setting."""

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
    said = read_yaml(path)
    if not isinstance(said, dict):
        raise MoexpError("a sweep must be a mapping", where=str(path))
    valid = list(SweepSection.model_fields)
    for key in said:
        if key not in valid:
            nearest = get_close_matches(str(key), valid, n=1, cutoff=0.0)[0]
            raise MoexpError(f"unknown key {key}", where=str(path), valid=f"nearest is {nearest}")
    try:
        return SweepSection.model_validate_json(json.dumps(said))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"][:1]) or "recording"
        what = f"missing value for {key}" if problem["type"] == "missing" else f"bad value for {key}"
        raise MoexpError(what, where=str(path), valid=problem["msg"].removeprefix("Value error, ")) from error
    except TypeError as error:
        raise MoexpError(f"a value that is not plain YAML: {error}", where=str(path)) from error


def parts_of(sweep: SweepSection) -> list[Part]:
    """All points of a sweep, by machine; settings that would do the same stand there once."""
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
