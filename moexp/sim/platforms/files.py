"""Files of platforms.

    platform = load_platform("cg")                                   # for the first model that it lists
    platform = load_platform("cg", model="Moonlight-16B-A3B")
    platform.link.bandwidth_gb_s, platform.sources["link.bandwidth_gb_s"]

Shipped ones are in `recipes/platforms/`; `moexp calibrate` writes `this-machine` to `$MOEXP_HOME/platforms/`. A file
gives each constant as `{value | formula | paper, source}` (`moexp.sim.platforms.constants`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moexp.base.errors import MoexpError
from moexp.base.yamlio import read_yaml
from moexp.config.locations import home
from moexp.config.recipe import find_named, recipe_folders
from moexp.sim.platforms.constants import Resolver
from moexp.sim.platforms.geometry import PRECISIONS, UNQUANTISED, find_geometry
from moexp.sim.platforms.platform import SECTIONS, TYPED, SimPlatform
from moexp.sim.sections import check_keys, parse_section

THIS_MACHINE = "this-machine"
NATIVE = "native"  # a precision: the checkpoint's own
_HEAD = ("name", "summary", "tag", "models", "provenance")


class PlatformInfo(NamedTuple):
    """A platform, as `moexp platforms` shows it."""

    name: str
    tag: str
    models: tuple[str, ...]
    summary: str
    path: Path


def load_platform(name_or_path: str | Path, model: str | None = None) -> SimPlatform:
    """The platform of that name or file, its constants worked out for `model` (None: the first that it lists).

    Raises:
        MoexpError: no such platform or model, an unknown key, a constant without a source, a bad value.
    """
    path = find_platform(name_or_path)
    return parse_platform(path, read_yaml(path), model)


def parse_platform(path: Path, values: Any, model: str | None = None) -> SimPlatform:
    """`load_platform` of a file with these values."""
    where = str(path)
    models = _models(values, where)
    model = model or models[0]
    if model not in models:
        raise MoexpError(f"no constants for {model!r}", where=where, valid=", ".join(models))
    raw = {f"{section}.{key}": value for section in SECTIONS for key, value in values.get(section, {}).items()}
    precisions = {f"precision.{name}": _precision(raw, name, model, where) for name in TYPED["precision"].model_fields}
    experts = precisions["precision.experts"] or UNQUANTISED
    constants = Resolver(raw, model=model, reference=models[0], precision=experts, where=where)
    resolved: dict[str, Any] = {section: {} for section in SECTIONS}
    sources: dict[str, str] = {}
    for key in raw:
        section, _, name = key.partition(".")
        value, sources[key] = constants[key]
        resolved[section][name] = precisions.get(key, value)
    head = {"name": path.stem} | {key: values[key] for key in _HEAD if key in values and key != "models"}
    return parse_section(SimPlatform, {**head, **resolved, "model": model, "sources": sources}, where)


def find_platform(name_or_path: str | Path) -> Path:
    """The file of a platform given by path or by name (with or without `.yaml`)."""
    known = _known()
    missing = "" if THIS_MACHINE in known else f" ({THIS_MACHINE}: run moexp calibrate)"
    return find_named(name_or_path, known, "platform", note=missing)


def list_platforms() -> list[PlatformInfo]:
    """Every platform by name, each fully loaded for all of its models, so that a broken one cannot hide."""
    infos = []
    for path in _known().values():
        values = read_yaml(path)
        models = tuple(_models(values, str(path)))
        first, *_ = [parse_platform(path, values, model) for model in models]
        infos.append(PlatformInfo(first.name, first.tag, models, first.summary, path))
    return infos


def machine_file() -> Path:
    """Where `moexp calibrate` writes."""
    return home() / "platforms" / f"{THIS_MACHINE}.yaml"


def _known() -> dict[str, Path]:
    """Name -> file of the shipped platforms and those under `$MOEXP_HOME`, sorted by name."""
    folders = [*(folder / "platforms" for folder in recipe_folders()), machine_file().parent]
    return dict(sorted((file.stem, file) for folder in folders for file in folder.glob("*.yaml")))


def _models(values: Any, where: str) -> list[str]:
    """The models that a file lists, its keys checked (those within a constant are not yet)."""
    check_keys(values, (*_HEAD, *SECTIONS), where, what="a platform")
    for section in SECTIONS:
        inner = values.get(section, {})
        check_keys(inner, TYPED[section].model_fields if section in TYPED else inner, where, key=section)
    models = values.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(model, str) for model in models):
        raise MoexpError("missing or bad value for models", where=where, valid="a list of model names")
    return models


def _precision(raw: Mapping[str, Any], name: str, model: str, where: str) -> str | None:
    """The format that a file names, the checkpoint's own looked up; None: the file names none."""
    key = f"precision.{name}"
    if key not in raw:
        return None
    if isinstance(raw[key], dict) and raw[key].get("value") == NATIVE:
        geometry = find_geometry(model)
        return geometry.precision if name == "experts" else geometry.resident_precision
    value = Resolver(raw, model=model, reference=model, precision=UNQUANTISED, where=where)[key].value
    if str(value) not in PRECISIONS:
        raise MoexpError(f"bad value for {key}: {value!r}", where=where, valid=", ".join((*PRECISIONS, NATIVE)))
    return str(value)
