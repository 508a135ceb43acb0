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
from typing import Any, NamedTuple

from moexp.base.errors import MoexpError
from moexp.base.formula import evaluate, names_in
from moexp.config.recipe import nearest_key
from moexp.papers import load_paper
from moexp.sim.platforms.geometry import PUBLISHED_MODELS
from moexp.sim.sections import check_keys

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
        raw: dotted key -> the file's value.
        model: for which the platform is loaded.
        reference: the first model that the file lists.
        precision: format of routed experts, for `expert_bytes`.
        where: the file, for errors.
    """

    def __init__(self, raw: Mapping[str, Any], *, model: str, reference: str, precision: str, where: str) -> None:
        self._raw, self._where, self._precision = raw, where, precision
        self._models = {"model": model, "reference": reference}
        self._resolved: dict[str, Constant] = {}
        self._open: list[str] = []

    def __getitem__(self, key: str) -> Constant:
        """The constant of that dotted key.

        Raises:
            MoexpError: no source, not exactly one of value, formula and paper, an unknown key or name, or a circle.
        """
        if key not in self._resolved:
            if key in self._open:
                raise self._error(f"constants need each other: {' -> '.join([*self._open, key])}")
            self._open.append(key)
            self._resolved[key] = self._resolve(key, self._raw[key])
            self._open.pop()
        return self._resolved[key]

    def _resolve(self, key: str, entry: Any) -> Constant:
        if not isinstance(entry, Mapping):
            raise self._error(f"{key} has no source", "{value: ..., source: ...}")
        check_keys(entry, (*KINDS, "source"), self._where, key=key)
        kinds = [kind for kind in KINDS if kind in entry]
        if len(kinds) != 1:
            raise self._error(f"{key} needs exactly one of value, formula and paper", ", ".join(KINDS))
        source = entry.get("source", "")
        if not isinstance(source, str) or (not source.strip() and kinds != ["paper"]):
            raise self._error(f"{key} has no source", "a few words that say where it comes from")
        if kinds == ["value"]:
            return Constant(entry["value"], source)
        if kinds == ["formula"]:
            return self._derived(key, entry["formula"], source)
        value, cited = self._cell(key, entry["paper"])
        return Constant(value, f"{cited}; {source}" if source else cited)

    def _derived(self, key: str, formula: Any, source: str) -> Constant:
        if not isinstance(formula, str):
            raise self._error(f"bad value for {key}.formula: {formula!r}", "a string")
        where = f"{self._where}, {key}"
        names = names_in(formula, where=where)
        values = {name: self._number(name) for name in names}
        with_values = ", ".join(f"{name} = {values[name]:.6g}" for name in names)
        derived = f"{source}: {formula}" + (f", with {with_values}" if names else "")
        return Constant(evaluate(formula, values.__getitem__, where=where), derived)

    def _number(self, name: str) -> float:
        if name in self._raw:
            value = self[name].value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._error(f"{name} is not a number: {value!r}")
            return value
        owner, _, part = name.partition(".")
        if owner in self._models and part in _SHAPE:
            model = self._models[owner]
            if model not in PUBLISHED_MODELS:
                raise self._error(f"the shape of {model!r} is not known", ", ".join(PUBLISHED_MODELS))
            geometry = PUBLISHED_MODELS[model]
            return geometry.expert_bytes(self._precision) if part == "expert_bytes" else float(getattr(geometry, part))
        valid = [*self._raw, *(f"{owner}.{part}" for owner in self._models for part in _SHAPE)]
        raise self._error(f"unknown name {name} in a formula", f"nearest is {nearest_key(name, valid)}")

    def _cell(self, key: str, cell: Any) -> tuple[Any, str]:
        """The value of a paper's cell, and its citation."""
        check_keys(cell, _CELL, self._where, key=f"{key}.paper", what="a mapping of " + ", ".join(_CELL))
        lacking = [name for name in ("id", "row", "column") if name not in cell]
        if lacking or ("table" in cell) == ("figure" in cell):
            raise self._error(f"{key}.paper is incomplete", "id, table or figure, row and column")
        paper = load_paper(str(cell["id"]))
        if "table" in cell:
            rows, source = paper.table(cell["table"]).rows, f"Table {cell['table']}"
        else:
            rows, source = paper.figures.get(cell["figure"], {}).get("rows", []), f"Figure {cell['figure']}"
        wanted = {name: self._models["model"] if value == "$model" else value for name, value in cell["row"].items()}
        matches = [row for row in rows if all(_agrees(row.get(name), value) for name, value in wanted.items())]
        column = cell["column"]
        if len(matches) != 1 or column not in matches[0]:
            where = f"{len(matches)} rows of {source} of {paper.id}"
            raise self._error(f"{key}.paper names {where}", "one that has the column")
        row = ", ".join(str(matches[0][name]) for name in wanted)
        return matches[0][column], f"arXiv:{paper.arxiv}, {source}, {column} ({row})"

    def _error(self, what: str, valid: str = "") -> MoexpError:
        return MoexpError(what, where=self._where, valid=valid)


def _agrees(cell: Any, wanted: Any) -> bool:
    return cell in wanted if isinstance(wanted, list) else cell == wanted
