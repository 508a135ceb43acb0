"""Platforms to simulate: how fast experts arrive, how many stay, what computing costs; each constant with its source.

    platform = load_platform("cg")                                   # for the first model that it lists
    platform = load_platform("cg", model="Moonlight-16B-A3B")
    platform.link.bandwidth_gb_s, platform.sources["link.bandwidth_gb_s"]

Shipped ones are in `recipes/platforms/`; `moexp calibrate` writes `this-machine` to `$MOEXP_HOME/platforms/`. A file
gives each constant as `{value | formula | paper, source}` (moexp/sim/constants.py); one without a source is refused.
How costs add up is in moexp/sim/hardware.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from moexp.base.errors import MoexpError
from moexp.base.yamlio import dump_yaml, read_yaml
from moexp.config.locations import home
from moexp.config.recipe import find_named, nearest_key, recipe_folders
from moexp.config.section import Section
from moexp.sim.constants import Resolver
from moexp.sim.geometry import PRECISIONS, UNQUANTISED, Geometry, find_geometry
from moexp.sim.hardware import NATIVE, ComputeSection, LinkSection, PrecisionSection, SlotsSection

THIS_MACHINE = "this-machine"


class SimPlatform(Section):
    """One platform, for one model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    summary: str
    tag: Literal["paper", "measured"]
    """Origin of the constants: a paper's figures (published rates where it gives none), or this very machine."""
    model: str
    """Whose `compute` this is."""
    link: LinkSection
    slots: SlotsSection
    compute: ComputeSection
    precision: PrecisionSection
    given: dict[str, float] = {}
    """What other constants are derived from."""
    checks: dict[str, float] = {}
    """Figures to hold a simulation against; it does not use them."""
    sources: dict[str, str]
    """Dotted key of each constant -> where it comes from."""
    provenance: dict[str, Any] = {}
    """Of measured ones: command, commit, versions, hardware."""

    @model_validator(mode="after")
    def _sourced(self) -> SimPlatform:
        for key, _ in self.constants():
            if not self.sources.get(key, "").strip():
                raise ValueError(f"a source for {key}")
        return self

    def constants(self) -> Iterator[tuple[str, Any]]:
        """Dotted key and value of every constant that is set."""
        for section in _SECTIONS:
            held = getattr(self, section)
            values = held if isinstance(held, dict) else held.model_dump()
            yield from ((f"{section}.{key}", value) for key, value in values.items() if value is not None)

    def to_yaml(self) -> str:
        """The platform as a file, formulas worked out; `load_platform` reads it back as an equal platform."""
        head = {"name": self.name, "summary": self.summary, "tag": self.tag, "models": [self.model]}
        body: dict[str, Any] = {}
        for key, value in self.constants():
            section, _, name = key.partition(".")
            body.setdefault(section, {})[name] = {"value": value, "source": self.sources[key]}
        return dump_yaml({**head, **body, **({"provenance": self.provenance} if self.provenance else {})})

    # --- what follows from the constants ---

    def expert_bytes(self, geometry: Geometry) -> int:
        """Bytes of one routed expert on the link."""
        return geometry.expert_bytes(self.precision.experts)

    def slot_bytes(self, geometry: Geometry) -> int | None:
        """Room for routed experts; None: what one cycle needs."""
        if self.slots.fraction is not None:
            return int(self.slots.fraction * geometry.pool_bytes(self.precision.experts))
        return self.slots.bytes

    def transfer_us(self, size: float, sharing: int = 1) -> float:
        """A transfer of `size` bytes while `sharing` of them, this one included, are under way."""
        alone = self.link.alone_gb_s or self.link.bandwidth_gb_s
        return self.link.latency_us + size / (min(alone, self.link.bandwidth_gb_s / sharing) * 1e3)

    def compute_us(self, geometry: Geometry, rows: int, union: float, rows_per_expert: float = 1) -> float:
        """A step without loading, each MoE layer of which computes `union` experts over `rows_per_expert` rows."""
        c = self.compute
        routed = c.routed_us_per_expert + (rows_per_expert - 1) * c.routed_us_per_token
        moe = c.router_us + c.shared_us(rows) + union * routed
        return c.step_fixed_us(rows) + geometry.layers * c.attention_us(rows) + geometry.moe_layers * moe

    def ar_compute_us(self, geometry: Geometry) -> float:
        """A one-token AR step with every expert in place, padding included."""
        rows = self.compute.padded(1)
        return self.compute_us(geometry, rows, geometry.top_k, rows)

    def ar_beside_us(self, geometry: Geometry) -> float:
        """Of `ar_compute_us`, what runs while a layer's experts come: the shared ones, and every routed one but the
        last.
        """
        rows = self.compute.padded(1)
        layer_us = self.compute.shared_us(rows) + (geometry.top_k - 1) * self.compute.routed_us(rows)
        return geometry.moe_layers * layer_us

    def ar_load_us(self, geometry: Geometry) -> float:
        """The transfers of a one-token AR step that finds no expert in place, with nothing beside them."""
        size = self.expert_bytes(geometry)
        waits = self.link.latency_us / self.link.concurrency
        return geometry.experts_per_token * (waits + size / (self.link.bandwidth_gb_s * 1e3))


_SECTIONS = ("link", "slots", "compute", "precision", "given", "checks")
_TYPED: dict[str, type[Section]] = {
    "link": LinkSection,
    "slots": SlotsSection,
    "compute": ComputeSection,
    "precision": PrecisionSection,
}
_HEAD = ("name", "summary", "tag", "models", "provenance")


class PlatformInfo(NamedTuple):
    """A platform, as `moexp platforms` shows it."""

    name: str
    tag: str
    models: tuple[str, ...]
    summary: str
    path: Path


# --- reading ---


def load_platform(name_or_path: str | Path, model: str | None = None) -> SimPlatform:
    """The platform of that name or file, its constants worked out for `model` (None: the first that it lists).

    Raises:
        MoexpError: no such platform or model, an unknown key, a constant without a source, a bad value.
    """
    path = find_platform(name_or_path)
    return _load(path, _read(path), model)


def _load(path: Path, said: dict[str, Any], model: str | None) -> SimPlatform:
    models = said["models"]
    model = model or models[0]
    if model not in models:
        raise MoexpError(f"no constants for {model!r}", where=str(path), valid=", ".join(models))
    raw = {f"{section}.{key}": value for section in _SECTIONS for key, value in said.get(section, {}).items()}
    precision: dict[str, str] = {
        key: _precision(raw, key, model, str(path)) for key in ("precision.experts", "precision.resident") if key in raw
    }
    experts = precision.get("precision.experts", UNQUANTISED)
    constants = Resolver(raw, model=model, reference=models[0], precision=experts, where=str(path))
    values: dict[str, Any] = {section: {} for section in _SECTIONS}
    sources: dict[str, str] = {}
    for key in raw:
        section, _, name = key.partition(".")
        value, sources[key] = constants[key]
        values[section][name] = precision.get(key, value)
    values |= {key: said[key] for key in ("name", "summary", "tag", "provenance") if key in said}
    try:
        return SimPlatform.model_validate_json(
            json.dumps({"name": path.stem, **values, "model": model, "sources": sources})
        )
    except ValidationError as error:
        raise _explain(error, path) from error
    except TypeError as error:
        raise MoexpError(f"a value that is not plain YAML: {error}", where=str(path)) from error


def find_platform(name_or_path: str | Path) -> Path:
    """The file of a platform given by path or by name (with or without `.yaml`)."""
    known = _known()
    missing = "" if THIS_MACHINE in known else f" ({THIS_MACHINE}: run moexp calibrate)"
    return find_named(name_or_path, known, "platform", note=missing)


def list_platforms() -> list[PlatformInfo]:
    """Every platform by name, each fully loaded for all of its models, so that a broken one cannot hide."""
    infos = []
    for path in _known().values():
        said = _read(path)
        loaded = [_load(path, said, model) for model in said["models"]]
        first = loaded[0]
        infos.append(PlatformInfo(first.name, first.tag, tuple(each.model for each in loaded), first.summary, path))
    return infos


def machine_file() -> Path:
    """Where `moexp calibrate` writes."""
    return home() / "platforms" / f"{THIS_MACHINE}.yaml"


def _known() -> dict[str, Path]:
    """Name -> file of the shipped platforms and those under `$MOEXP_HOME`, sorted by name."""
    folders = [*(folder / "platforms" for folder in recipe_folders()), machine_file().parent]
    return dict(sorted((file.stem, file) for folder in folders for file in folder.glob("*.yaml")))


def _read(path: Path) -> dict[str, Any]:
    """A file's mapping, its keys checked (those within a constant are not yet)."""
    said = read_yaml(path)
    if not isinstance(said, dict):
        raise MoexpError("a platform must be a mapping of sections", where=str(path))
    typed = [f"{section}.{key}" for section, schema in _TYPED.items() for key in schema.model_fields]
    for key, held in said.items():
        if key not in (*_HEAD, *_SECTIONS):
            nearest = nearest_key(str(key), [*_HEAD, *_SECTIONS, *typed])
            raise MoexpError(f"unknown key {key}", where=str(path), valid=f"nearest is {nearest}")
        if key in _SECTIONS and not isinstance(held, dict):
            raise MoexpError(f"bad value for {key}", where=str(path), valid="a mapping")
        if key in _TYPED:
            for name in held:
                if f"{key}.{name}" not in typed:
                    nearest = nearest_key(f"{key}.{name}", typed)
                    raise MoexpError(f"unknown key {key}.{name}", where=str(path), valid=f"nearest is {nearest}")
    models = said.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(model, str) for model in models):
        raise MoexpError("missing or bad value for models", where=str(path), valid="a list of model names")
    return said


def _precision(raw: dict[str, Any], key: str, model: str, where: str) -> str:
    """The format that a file names, the checkpoint's own looked up."""
    said = raw[key]
    if isinstance(said, dict) and said.get("value") == NATIVE:
        shape = find_geometry(model)
        return shape.precision if key == "precision.experts" else shape.resident_precision
    name = Resolver(raw, model=model, reference=model, precision=UNQUANTISED, where=where)[key].value
    if str(name) not in PRECISIONS:
        raise MoexpError(f"bad value for {key}: {name!r}", where=where, valid=", ".join((*PRECISIONS, NATIVE)))
    return str(name)


def _explain(error: ValidationError, path: Path) -> MoexpError:
    """The first bad value as one line."""
    problem = error.errors(include_url=False)[0]
    dotted = ".".join(str(part) for part in problem["loc"]) or "platform"
    if problem["type"] == "missing":
        return MoexpError(f"missing value for {dotted}", where=str(path))
    shown = "" if isinstance(problem["input"], dict) else f": {json.dumps(problem['input'], default=str)}"
    valid = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return MoexpError(f"bad value for {dotted}{shown}", where=str(path), valid=valid)
