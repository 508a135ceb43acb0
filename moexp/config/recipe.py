"""YAML recipes: inheritance, overrides, and errors that name the nearest valid key.

A recipe is a file of the values of `Recipe`. `base: NAME|PATH` starts from another one: sections are merged, everything
else is replaced. Each source (a base, the file, every `--set`) is checked on its own, so that an error names it.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

import moexp
from moexp.base.errors import MoexpError
from moexp.base.yamlio import dump_yaml, parse_yaml, read_yaml
from moexp.config.bench import BenchSection, EcoSpecSection, EvalSection, SimulationSection, TuneSection
from moexp.config.decode import DecodeSection, StoreSection
from moexp.config.learn import DraftSection, HeadSection, PredictorSection
from moexp.config.section import NonNegative, Section
from moexp.config.target import TargetSection, TraceSection

_NOT_INHERITED = ("name", "summary")


class PathsSection(Section):
    """Folders to use in place of those under `$MOEXP_HOME`; what `--out` sets."""

    target: str | None = None
    """Where the built target lies, or is to lie."""
    draft_experts: str | None = None
    predictor: str | None = None
    head: str | None = None
    """A published head to draft with: a folder or a hub id with an EAGLE-3 head, or (head.kind mtp) with the target's
    own checkpoint, whose layer for multi-token prediction it is."""


class Recipe(Section):
    """A resolved recipe: every value set, nothing left to look up."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names folders of results; the file's name unless given. Not inherited from `base`."""
    summary: str = ""
    """One line for `moexp recipes`. Not inherited from `base`."""
    seed: NonNegative = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegative = 0
    """Compute threads; 0 takes one a core."""
    target: TargetSection = TargetSection()
    trace: TraceSection = TraceSection()
    draft: DraftSection = DraftSection()
    predictor: PredictorSection = PredictorSection()
    head: HeadSection = HeadSection()
    decode: DecodeSection = DecodeSection()
    store: StoreSection = StoreSection()
    bench: BenchSection = BenchSection()
    ecospec: EcoSpecSection = EcoSpecSection()
    eval: EvalSection = EvalSection()
    tune: TuneSection = TuneSection()
    simulation: SimulationSection = SimulationSection()
    paths: PathsSection = PathsSection()

    def resolved_yaml(self) -> str:
        """The recipe as YAML; `load_recipe` reads it back as an equal recipe."""
        return dump_yaml(self.model_dump(mode="json"))

    def digest(self, *sections: str) -> str:
        """Twelve hex digits over the values of `sections` (dotted names): the end of an artifact's name."""
        assert sections, "name the sections that the artifact depends on"
        values = self.model_dump(mode="json")
        chosen = {}
        for dotted in sorted(sections):
            value: Any = values
            for part in dotted.split("."):
                assert part in value, f"no section {dotted}"
                value = value[part]
            chosen[dotted] = value
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


class RecipeInfo(NamedTuple):
    """A shipped recipe, as `moexp recipes` shows it."""

    name: str
    summary: str
    path: Path


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that shipped name or file, with `a.b=value` overrides applied last.

    Raises:
        MoexpError: no such recipe, an unknown key, a value of the wrong kind, or a circle of bases.
    """
    return _load(find_recipe(name_or_path), overrides)


def load_method(name_or_path: str | Path, base: str | Path) -> Recipe:
    """A recipe, or a method (a file, or a name in `recipes/methods`) without a base, laid over `base`.

    Raises:
        MoexpError: as for `load_recipe`.
    """
    path = find_named(name_or_path, {**_shipped("methods"), **_shipped()}, "recipe or method")
    return _load(path, base=find_recipe(base))


def _load(path: Path, overrides: Sequence[str] = (), base: Path | None = None) -> Recipe:
    values, origins = _read_with_base(path, (), base)
    origins.setdefault("name", str(path))
    for override in overrides:
        where = f"--set {override}"
        change = _parse_override(override, where)
        _check_keys(change, where)
        _merge(values, change, origins, where)
    try:
        # By way of JSON: there strict mode takes a list for a tuple and 1 for 1.0, but never "1" for 1.
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise _explain(error, origins) from error
    except TypeError as error:
        raise MoexpError(f"a value that is not plain YAML: {error}", where=str(path)) from error


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe given by path or by shipped name (with or without `.yaml`)."""
    return find_named(name_or_path, _shipped(), "recipe", where="--recipe")


def find_named(
    name_or_path: str | Path, known: Mapping[str, Path], what: str, *, where: str = "", note: str = ""
) -> Path:
    """A file given by path, or by its name among those known (with or without `.yaml`).

    Raises:
        MoexpError: neither; it names the nearest one, with `what`, `where` and, after the valid names, `note`.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    name = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if path.parent == Path(".") and name in known:
        return known[name]
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise MoexpError(
        f"no {what} {str(name_or_path)!r}", where=where, valid=f"{hint}a path, or one of {', '.join(known)}{note}"
    )


def list_recipes() -> list[RecipeInfo]:
    """Every shipped recipe by name, each fully loaded."""
    recipes = [(load_recipe(file), file) for file in _shipped().values()]
    return [RecipeInfo(recipe.name, recipe.summary, file) for recipe, file in recipes]


def recipe_folders() -> list[Path]:
    """Where shipped recipes are: `recipes/` of a clone, or `moexp/_recipes` of an installed wheel."""
    package = Path(moexp.__file__).parent
    clone = package.parent
    # pyproject.toml tells a clone from a site-packages folder that happens to hold something named recipes.
    candidates = [clone / "recipes"] if (clone / "pyproject.toml").is_file() else []
    return [folder for folder in (*candidates, package / "_recipes") if folder.is_dir()]


def _shipped(below: str = "") -> dict[str, Path]:
    """Name -> file of every shipped recipe, or of those in a folder below, sorted by name."""
    files = {file.stem: file for folder in recipe_folders() for file in (folder / below).glob("*.yaml")}
    return dict(sorted(files.items()))


def valid_keys() -> list[str]:
    """Every dotted key that a recipe may set, sections included."""
    return [key for key, _ in _walk_schema(Recipe, "")] + ["base"]


def nearest_key(key: str, among: Sequence[str] | None = None) -> str:
    """The dotted key most like `key`, by full name or last part, of a recipe's or of those given."""
    leaf = key.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> tuple[float, int]:
        full = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, leaf, candidate.rsplit(".", 1)[-1]).ratio()
        return max(full, last - 0.1), -len(candidate)

    return max(valid_keys() if among is None else among, key=likeness)


# --- reading ---


def _read_with_base(
    path: Path, chain: tuple[Path, ...], default: Path | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a file over those of its bases (`default` where it names none), and the source of each key."""
    resolved = path.resolve()
    if resolved in chain:
        circle = " -> ".join(step.name for step in (*chain, resolved))
        raise MoexpError(f"recipes name each other as base: {circle}", where=str(path))
    own = read_yaml(path)
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise MoexpError("a recipe must be a mapping of sections", where=str(path))
    _check_keys(own, str(path))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    base = own.pop("base", None)
    if base is None and default is not None and default.resolve() != resolved:
        base = str(default.resolve())
    if base is not None:
        if not isinstance(base, str):
            raise MoexpError(f"bad value for base: {base!r}", where=str(path), valid="a recipe's name or path")
        beside = path.parent / base
        values, origins = _read_with_base(beside if beside.is_file() else find_recipe(base), (*chain, resolved))
        for key in _NOT_INHERITED:
            values.pop(key, None)
    _merge(values, own, origins, str(path))
    values.setdefault("name", path.stem)
    return values, origins


def _parse_override(text: str, where: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise MoexpError(f"cannot read override {text!r}", where="--set", valid="section.key=value")
    change: Any = parse_yaml(value, where=where)
    for part in reversed(parts):
        change = {part: change}
    if "base" in change:
        raise MoexpError("base cannot be overridden", where=where, valid="--recipe with another recipe")
    return change


def _merge(
    into: dict[str, Any],
    change: Mapping[str, Any],
    origins: dict[str, str],
    where: str,
    *,
    schema: type[Section] | None = Recipe,
    prefix: str = "",
) -> None:
    """Lays `change` over `into`, in place: sections are merged, values replaced."""
    for key, value in change.items():
        inner = _section_of(schema, key) if schema else None
        dotted = f"{prefix}{key}"
        if inner and isinstance(value, dict):
            below = into[key] if isinstance(into.get(key), dict) else {}
            into[key] = dict(below)
            _merge(into[key], value, origins, where, schema=inner, prefix=f"{dotted}.")
        else:
            into[key] = value
        origins[dotted] = where


# --- checking ---


def _section_of(schema: type[Section], key: str) -> type[Section] | None:
    """The section that `key` holds (also when it may be null), or None for a plain value."""
    field = schema.model_fields.get(key)
    if field is None:
        return None
    union = get_origin(field.annotation) in (Union, types.UnionType)
    for candidate in get_args(field.annotation) if union else (field.annotation,):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _walk_schema(schema: type[Section], prefix: str) -> Iterator[tuple[str, type[Section] | None]]:
    for key in schema.model_fields:
        inner = _section_of(schema, key)
        yield f"{prefix}{key}", inner
        if inner:
            yield from _walk_schema(inner, f"{prefix}{key}.")


def _check_keys(values: Mapping[Any, Any], where: str, *, schema: type[Section] = Recipe, prefix: str = "") -> None:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if key not in schema.model_fields and dotted != "base":
            raise MoexpError(f"unknown key {dotted}", where=where, valid=f"nearest is {nearest_key(dotted)}")
        inner = _section_of(schema, key)
        if inner and isinstance(value, dict):
            _check_keys(value, where, schema=inner, prefix=f"{dotted}.")
        elif inner is None and isinstance(value, dict):
            unknown = f"{dotted}.{next(iter(value), '')}"
            raise MoexpError(f"unknown key {unknown}", where=where, valid=f"nearest is {dotted}, a plain value")


def _explain(error: ValidationError, origins: Mapping[str, str]) -> MoexpError:
    """The first bad value of a validation error as one line: key, value, where it was set, what is valid."""
    keys = set(valid_keys())
    by_key: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors(include_url=False):
        # A union's branches stand in the location too; the key is the longest prefix that is one.
        parts = [str(part) for part in problem["loc"]]
        dotted = next((k for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in keys), "recipe")
        by_key.setdefault(dotted, []).append(problem)
    dotted, problems = next(iter(by_key.items()))
    where = next((origins[k] for k in _prefixes(dotted) if k in origins), "")
    if problems[0]["type"] == "missing":
        return MoexpError(f"missing value for {dotted}", where=where)
    value = problems[0]["input"]
    shown = "" if isinstance(value, dict) else f": {json.dumps(value, default=str)}"
    messages = [
        problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ").replace("an object", "a mapping")
        for problem in problems
    ]
    return MoexpError(f"bad value for {dotted}{shown}", where=where, valid=" or ".join(dict.fromkeys(messages)))


def _prefixes(dotted: str) -> Iterator[str]:
    while dotted:
        yield dotted
        dotted = dotted.rpartition(".")[0]
