"""YAML in and out, without the surprises of YAML 1.1.

PyYAML alone reads `1e-3` as a string, `no` as false, `1:30` as 90 and lets the second of two equal keys win
in silence. In a file that decides what an experiment does, each of those is a wrong result without an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from moexp.base.errors import MoexpError

# (tag, pattern, first characters); the first match wins, so int stands before float.
_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)",
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key!r}", problem_mark=key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    # The same rules as the loader: what would be read back as a number is quoted.
    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, *, where: str) -> Any:
    """The value that `text` holds; a mistake in it is a MoexpError that names `where` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise MoexpError(f"not valid YAML: {error.problem}", where=f"{where}{line}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise MoexpError(f"not valid YAML: {str(error).splitlines()[0]}", where=where) from error


def read_yaml(path: Path) -> Any:
    """The value in the file at `path`; MoexpError if it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MoexpError("not a text file in UTF-8", where=str(path)) from error
    except OSError as error:
        raise MoexpError(f"cannot read: {error.strerror}", where=str(path)) from error
    return parse_yaml(text, where=str(path))


def dump_yaml(value: Any) -> str:
    """`value` as YAML that `parse_yaml` reads back as the same value."""
    # ASCII only: with allow_unicode, PyYAML folds rare line separators (U+0085) into spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, default_flow_style=False)
