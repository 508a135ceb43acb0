"""Constants of a platform file, each with its source: given as a value, read from a paper's table, or derived.

    latency_us: {value: 10, source: a datasheet}
    ar_tps: {paper: {id: draftexpert, table: 2, row: {platform: CG, method: ar}, column: tokens_per_s}}
    compute_us: {formula: "1e6 / given.ar_tps", source: why this is so}

A formula may name any constant of the file by its dotted key, and the shape of the model that the platform is loaded
for (`model.expert_bytes`) or of the first that the file lists (`reference.expert_bytes`). In a paper's row, `$model` is
that model's name, and a list means any of its members.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from moexp.base.errors import MoexpError
from moexp.base.formula import evaluate, names_in
from moexp.config.recipe import nearest_key
from moexp.papers import Paper, load_paper
from moexp.sim.geometry import GEOMETRIES

KINDS = ("value", "formula", "paper")
_CELL = ("id", "table", "figure", "row", "column")
_SHAPE = (
    "layers", "moe_layers", "dense_layers", "experts", "top_k", "experts_per_token", "expert_params", "shared_params",
    "router_params", "dense_params", "attention_params", "head_params", "resident_params", "active_params",
    "expert_bytes",
)  # fmt: skip


class Constant(NamedTuple):
    """A resolved constant: what it is, and where it comes from."""

    value: Any
    source: str


class Resolver:
    """Looks up the constants of one file for one model.

    Args:
        raw: dotted key -> what the file says.
        model: whom the platform is loaded for.
        reference: the first model that the file lists.
        precision: format of routed experts, for `expert_bytes`.
        where: the file, for errors.
    """

    def __init__(self, raw: Mapping[str, Any], *, model: str, reference: str, precision: str, where: str) -> None:
        self._raw, self._where, self._precision = raw, where, precision
        self._models = {"model": model, "reference": reference}
        self._found: dict[str, Constant] = {}
        self._open: list[str] = []

    def __getitem__(self, key: str) -> Constant:
        """The constant of that dotted key.

        Raises:
            MoexpError: no source, not exactly one of value, formula and paper, an unknown key or name, or a circle.
        """
        if key not in self._found:
            if key in self._open:
                raise self._error(f"constants need each other: {' -> '.join([*self._open, key])}")
            self._open.append(key)
            self._found[key] = self._resolve(key, self._raw[key])
            self._open.pop()
        return self._found[key]

    def _resolve(self, key: str, said: Any) -> Constant:
        if not isinstance(said, Mapping):
            raise self._error(f"{key} has no source", "{value: ..., source: ...}")
        check_keys(said, (*KINDS, "source"), f"{key}.", self._where)
        kinds = [kind for kind in KINDS if kind in said]
        if len(kinds) != 1:
            raise self._error(f"{key} needs exactly one of value, formula and paper", ", ".join(KINDS))
        source = said.get("source", "")
        if not isinstance(source, str) or (not source.strip() and kinds != ["paper"]):
            raise self._error(f"{key} has no source", "a few words that say where it comes from")
        if kinds == ["value"]:
            return Constant(said["value"], source)
        if kinds == ["formula"]:
            return self._derived(key, said["formula"], source)
        value, place = self._cell(key, said["paper"])
        return Constant(value, f"{place}; {source}" if source else place)

    def _derived(self, key: str, formula: Any, source: str) -> Constant:
        if not isinstance(formula, str):
            raise self._error(f"bad value for {key}.formula: {formula!r}", "a string")
        where = f"{self._where}, {key}"
        names = names_in(formula, where=where)
        values = {name: self._number(name) for name in names}
        with_values = ", ".join(f"{name} = {values[name]:.6g}" for name in names)
        told = f"{source}: {formula}" + (f", with {with_values}" if names else "")
        return Constant(evaluate(formula, values.__getitem__, where=where), told)

    def _number(self, name: str) -> float:
        if name in self._raw:
            value = self[name].value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._error(f"{name} is not a number: {value!r}")
            return value
        whose, _, what = name.partition(".")
        if whose in self._models and what in _SHAPE:
            model = self._models[whose]
            if model not in GEOMETRIES:
                raise self._error(f"the shape of {model!r} is not known", ", ".join(GEOMETRIES))
            shape = GEOMETRIES[model]
            return shape.expert_bytes(self._precision) if what == "expert_bytes" else float(getattr(shape, what))
        valid = [*self._raw, *(f"{whose}.{what}" for whose in self._models for what in _SHAPE)]
        raise self._error(f"unknown name {name} in a formula", f"nearest is {nearest_key(name, valid)}")

    def _cell(self, key: str, cell: Any) -> tuple[Any, str]:
        if not isinstance(cell, Mapping):
            raise self._error(f"bad value for {key}.paper", "a mapping of " + ", ".join(_CELL))
        check_keys(cell, _CELL, f"{key}.paper.", self._where)
        lacking = [name for name in ("id", "row", "column") if name not in cell]
        if lacking or ("table" in cell) == ("figure" in cell):
            raise self._error(f"{key}.paper is incomplete", "id, table or figure, row and column")
        paper = _paper(str(cell["id"]))
        if "table" in cell:
            rows, place = paper.table(cell["table"]).rows, f"Table {cell['table']}"
        else:
            rows, place = paper.figures.get(cell["figure"], {}).get("rows", []), f"Figure {cell['figure']}"
        wanted = {
            column: self._models["model"] if value == "$model" else value for column, value in cell["row"].items()
        }
        found = [row for row in rows if all(_agrees(row.get(column), value) for column, value in wanted.items())]
        if len(found) != 1 or cell["column"] not in found[0]:
            raise self._error(
                f"{key}.paper names {len(found)} rows of {place} of {paper.id}", "one that has the column"
            )
        row = ", ".join(str(found[0][column]) for column in wanted)
        return found[0][cell["column"]], f"arXiv:{paper.arxiv}, {place}, {cell['column']} ({row})"

    def _error(self, what: str, valid: str = "") -> MoexpError:
        return MoexpError(what, where=self._where, valid=valid)


@cache
def _paper(name: str) -> Paper:
    return load_paper(name)  # a platform asks for a dozen of its cells


def check_keys(said: Mapping[Any, Any], valid: tuple[str, ...], prefix: str, where: str) -> None:
    """MoexpError naming the nearest valid key where a mapping has an unknown one."""
    for key in said:
        if key not in valid:
            nearest = nearest_key(f"{prefix}{key}", [f"{prefix}{name}" for name in valid])
            raise MoexpError(f"unknown key {prefix}{key}", where=where, valid=f"nearest is {nearest}")


def _agrees(cell: Any, wanted: Any) -> bool:
    return cell in wanted if isinstance(wanted, list) else cell == wanted
