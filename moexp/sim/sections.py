"""Reading a YAML file's values into a section; a mistake is one error that names the key and what is valid."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, TypeVar

from pydantic import ValidationError

from moexp.base.errors import MoexpError
from moexp.config.recipe import nearest_key
from moexp.config.section import Section

S = TypeVar("S", bound=Section)


def check_keys(values: Any, valid: Iterable[str], where: str, *, key: str = "", what: str = "") -> None:
    """Raises MoexpError unless `values` is a mapping with keys among `valid`; it names the nearest one.

    Args:
        key: dotted, of the values; "": they are all of a file.
        what: of a file, what it is; of a key, what is valid there.
    """
    if not isinstance(values, Mapping):
        if key:
            raise MoexpError(f"bad value for {key}", where=where, valid=what or "a mapping")
        raise MoexpError(f"{what} must be a mapping", where=where)
    dotted = {name: f"{key}.{name}" if key else name for name in valid}
    for name in values:
        if name not in dotted:
            unknown = f"{key}.{name}" if key else str(name)
            nearest = nearest_key(unknown, list(dotted.values()))
            raise MoexpError(f"unknown key {unknown}", where=where, valid=f"nearest is {nearest}")


def parse_section(schema: type[S], values: Mapping[str, Any], where: str) -> S:
    """The section with these values.

    Raises:
        MoexpError: a bad or missing value (the first one), or one that is not plain YAML.
    """
    try:
        # By way of JSON: there strict mode takes a list for a tuple and 1 for 1.0, but never "1" for 1.
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        # Behind an index stand the branches of a union.
        key = ".".join(takewhile(lambda part: isinstance(part, str), problem["loc"])) or "the file"  # type: ignore[arg-type]
        if problem["type"] == "missing":
            raise MoexpError(f"missing value for {key}", where=where) from error
        given = "" if isinstance(problem["input"], dict) else f": {json.dumps(problem['input'], default=str)}"
        valid = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise MoexpError(f"bad value for {key}{given}", where=where, valid=valid) from error
    except TypeError as error:
        raise MoexpError(f"a value that is not plain YAML: {error}", where=where) from error
