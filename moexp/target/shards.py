"""The safetensors files of a checkpoint: which there are, what their headers say, and reading tensors by name.

Anything pickled is refused: it could run code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.target.coding import SCALE, dequantise_fp8

DTYPES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

STORED_DTYPES = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}

INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its name there, bytes `start` (inclusive) to `stop` (exclusive), storage type and shape."""

    file: Path
    name: str
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]

    def part(self, number: int) -> StoredTensor:
        """Row `number` of the first dimension."""
        step = (self.stop - self.start) // self.shape[0]
        start = self.start + number * step
        return StoredTensor(self.file, self.name, start, start + step, self.dtype, self.shape[1:])


# --- headers ---


def checkpoint_files(folder: Path | str) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder, sorted by name.

    Raises:
        MoexpError: there is none, the index cannot be read, or a shard that it names is missing.
    """
    folder = Path(folder)
    shards = sorted(set(_weight_map(folder).values())) if (folder / INDEX).is_file() else ["model.safetensors"]
    for shard in shards:
        if not (folder / shard).is_file():
            valid = "model.safetensors, or an index and all its shards"
            raise MoexpError(f"shard {shard} is missing", where=str(folder), valid=valid)
    return tuple(folder / shard for shard in shards)


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        return {str(name): str(shard) for name, shard in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise MoexpError("unreadable shard index", where=str(folder / INDEX), valid="JSON with a weight_map") from error


def read_header(file: Path) -> dict[str, dict]:
    """Tensors of a safetensors file: name -> {dtype, shape, data_offsets}, offsets counted from the file's start.

    Raises:
        MoexpError: the file is no safetensors file, or is shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise MoexpError(f"shard {file.name} is cut within its header or is no safetensors file", where=str(file))
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            data = 8 + length
            for entry in header.values():
                begin, end = entry["data_offsets"]
                entry["data_offsets"] = (data + begin, data + end)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise MoexpError(f"shard {file.name} has an unreadable header", where=str(file)) from error
    expected = max((entry["data_offsets"][1] for entry in header.values()), default=data)
    if size != expected:
        raise MoexpError(f"shard {file.name} has {size} bytes where its header says {expected}", where=str(file))
    return header


def header_bytes(entries: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The bytes before the data of a safetensors file.

    Args:
        entries: tensors, name -> {dtype, shape, data_offsets}, offsets counted from the data's start.
    """
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def list_tensors(folder: Path, prefix: str = "") -> dict[str, StoredTensor]:
    """The tensors of a checkpoint folder whose names start with `prefix`; of a sharded one, only the shards that the
    index names for them are opened.

    Raises:
        MoexpError: no safetensors weights (pickled ones are never read), or damaged ones, or an index that names a
            tensor which its shard does not hold.
    """
    sharded = (folder / INDEX).is_file()
    if not sharded and not (folder / "model.safetensors").is_file():
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if pickled:
            what = f"the weights are pickled ({pickled[0]}), and pickle can run code: it is never read"
            valid = "model.safetensors (convert it once, where you trust the file)"
            raise MoexpError(what, where=str(folder), valid=valid)
    files = checkpoint_files(folder)
    indexed = {name: shard for name, shard in _weight_map(folder).items() if name.startswith(prefix)} if sharded else {}
    if sharded:
        files = tuple(file for file in files if file.name in set(indexed.values()))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name.startswith(prefix):
                start, stop = entry["data_offsets"]
                tensors[name] = StoredTensor(file, name, start, stop, entry["dtype"], tuple(entry["shape"]))
    for name, shard in indexed.items():
        if name not in tensors:
            raise MoexpError(f"tensor {name} is missing from {shard}, where the index puts it", where=str(folder))
    return tensors


# --- tensors ---


def read_tensors(
    entries: Mapping[str, StoredTensor],
    names: Iterable[str],
    dtype: Callable[[str], torch.dtype],
    *,
    device: str = "cpu",
    fp8_block: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Tensors by their keys in `entries`, floating ones in the type that `dtype` gives for the key.

    Files are opened one at a time: what is mapped may count as memory.

    Args:
        fp8_block: of a checkpoint in FP8: rows and columns that share a scale. Its matrices are dequantised.

    Raises:
        MoexpError: a tensor in another quantised type, or an FP8 one without its scales.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(entries[name].file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, inside in by_file.items():
        with safe_open(file, "pt", device=device) as shard:
            for name in inside:
                entry = entries[name]
                if fp8_block is not None and entry.dtype == "F8_E4M3":
                    scales = _scales(entries, name, fp8_block, device)
                    tensors[name] = torch.empty(entry.shape, dtype=dtype(name), device=device)
                    dequantise_fp8(shard.get_tensor(entry.name), scales, tensors[name], fp8_block)
                    continue
                if entry.dtype not in {*DTYPES, *INTEGERS}:
                    valid = f"one of {', '.join(DTYPES)}: dequantise it first"
                    raise MoexpError(f"{name} is stored as {entry.dtype}", where=str(file), valid=valid)
                tensor = shard.get_tensor(entry.name)
                # A copy: what `get_tensor` gives may be a view of the mapped file.
                tensors[name] = tensor.to(dtype(name) if tensor.is_floating_point() else tensor.dtype, copy=True)
    return tensors


def _scales(entries: Mapping[str, StoredTensor], name: str, block: tuple[int, int], device: str) -> Tensor:
    """The scales of an FP8 matrix; they may be in another shard than it is."""
    entry, matrix = entries.get(name + SCALE), entries[name]
    if entry is None:
        raise MoexpError(f"tensor {matrix.name + SCALE} is missing", valid="fp8 weights with a scale a block")
    if entry.shape != tuple(-(-size // step) for size, step in zip(matrix.shape, block, strict=True)):
        valid = f"one scale a block of {block[0]} x {block[1]}"
        raise MoexpError(f"{entry.name} is {list(entry.shape)}", valid=valid)
    with safe_open(entry.file, "pt", device=device) as shard:
        return shard.get_tensor(entry.name)


def shapes_of(tensors: Mapping[str, StoredTensor | Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors, stored or in memory, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_names(
    expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], *, where: str, what: str
) -> None:
    """The names and shapes of a checkpoint must be exactly those expected.

    Raises:
        MoexpError: names missing or unexpected, or a shape that is not the one that the geometry asks for.
    """
    missing = sorted(set(expected) - set(stored))
    unexpected = sorted(set(stored) - set(expected))
    if missing:
        raise MoexpError(f"{what}: tensor {_some(missing)} missing", where=where, valid=f"also {', '.join(missing)}")
    if unexpected:
        valid = ", ".join(sorted(expected))
        raise MoexpError(f"{what}: tensor {_some(unexpected)} not expected", where=where, valid=valid)
    for name, shape in expected.items():
        if stored[name] != shape:
            valid = f"{list(shape)}, by its config"
            raise MoexpError(f"{what}: {name} has shape {list(stored[name])}", where=where, valid=valid)


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
