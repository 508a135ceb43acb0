"""Rows of JSON Lines files, and the texts in a row's fields; every mistake is one line that names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moexp.base.errors import MoexpError

Row = Mapping[str, Any]


def json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(`file:line`, object) for each line that is not blank."""
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                where = f"{path}:{number}"
                if line.strip():
                    yield where, _json_object(line, where)
        except UnicodeDecodeError as error:
            raise MoexpError("not UTF-8 text", where=str(path)) from error


def _json_object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise MoexpError(f"not JSON: {error.msg}", where=where, valid="one JSON object a line") from error
    if not isinstance(row, dict):
        raise MoexpError("not a JSON object", where=where, valid="one JSON object a line")
    return row


def pick_texts(row: Row, fields: Sequence[str], where: str) -> tuple[str, ...]:
    """The texts in the first of `fields` that the row has."""
    field = next((field for field in fields if field in row), None)
    if field is None:
        missing = " or ".join(repr(field) for field in fields)
        raise MoexpError(f"no field {missing}", where=where, valid=", ".join(row) or "the row is empty")
    texts = _texts(row[field])
    if texts is None:
        valid = "a string, a list of strings, or chat messages"
        raise MoexpError(f"field {field!r} holds no text", where=where, valid=valid)
    return texts


def pick_id(row: Row, fields: Sequence[str], default: int) -> Any:
    """The first of `fields` that has a value, else `default`."""
    return next((row[field] for field in fields if row.get(field) is not None), default)


def _texts(value: Any) -> tuple[str, ...] | None:
    """A string, a list of strings, or chat messages (the user's); None for anything else."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, Mapping) and isinstance(item.get("content"), str) for item in value):
        return tuple(item["content"] for item in value if item.get("role") == "user") or None
    return None
