"""Reading tensors of a draft head from safetensors files by name; anything pickled is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.target.experts import DTYPES, checkpoint_files, read_header

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})


@dataclass(frozen=True)
class Entry:
    """Where a tensor is and by which name, its shape and its storage type."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def list_tensors(folder: Path, prefix: str = "") -> dict[str, Entry]:
    """The tensors of a checkpoint folder whose names start with `prefix`; of a sharded one, only the shards that the
    index names for them are opened.

    Raises:
        MoexpError: no safetensors weights (pickled ones are never read), or damaged ones, or an index that names a
            tensor which its shard does not hold.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file() and not (folder / "model.safetensors").is_file():
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if pickled:
            raise MoexpError(
                f"the weights are pickled ({pickled[0]}), and pickle can run code: it is never read",
                where=str(folder),
                valid="model.safetensors (convert it once, where you trust the file)",
            )
    files = checkpoint_files(folder)
    placed: Mapping[str, str] | None = None
    if index.is_file():
        placed = {n: shard for n, shard in json.loads(index.read_text())["weight_map"].items() if n.startswith(prefix)}
        files = tuple(file for file in files if file.name in set(placed.values()))
    found: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name.startswith(prefix):
                found[name] = Entry(file, name, tuple(entry["shape"]), entry["dtype"])
    for name, shard in (placed or {}).items():
        if name not in found:
            raise MoexpError(f"tensor {name} is missing from {shard}, where the index puts it", where=str(folder))
    return found


def read_tensors(entries: Mapping[str, Entry], names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors by their keys in `entries`, floating ones cast to `dtype`; each file is opened once.

    Raises:
        MoexpError: a tensor in a quantised type, which needs scales that this does not know.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(entries[name].file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, inside in by_file.items():
        with safe_open(file, "pt") as shard:
            for name in inside:
                if entries[name].dtype not in {*DTYPES, *INTEGERS}:
                    raise MoexpError(
                        f"{name} is stored as {entries[name].dtype}",
                        where=str(file),
                        valid=f"one of {', '.join(DTYPES)}: dequantise it first",
                    )
                tensor = shard.get_tensor(entries[name].name)
                # A copy: what `get_tensor` gives may be a view of the mapped file.
                tensors[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
    return tensors


def check_names(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, where: str, what: str
) -> None:
    """The names and shapes of a checkpoint must be exactly those expected.

    Raises:
        MoexpError: names missing or unexpected, or a shape that is not the one that the geometry asks for.
    """
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected))
    if missing:
        raise MoexpError(f"{what}: tensor {_some(missing)} missing", where=where, valid=f"also {', '.join(missing)}")
    if unexpected:
        raise MoexpError(
            f"{what}: tensor {_some(unexpected)} not expected", where=where, valid=", ".join(sorted(expected))
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise MoexpError(
                f"{what}: {name} has shape {list(found[name])}", where=where, valid=f"{list(shape)}, by its config"
            )


def read_json(file: Path, *, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        MoexpError: there is none.
    """
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise MoexpError(f"no readable {file.name}", where=str(file.parent), valid=what) from error
    if not isinstance(value, dict):
        raise MoexpError(f"{file.name} is no JSON object", where=str(file.parent), valid=what)
    return value


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
