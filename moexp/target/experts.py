"""Where each routed expert's bytes lie in a checkpoint: safetensors headers are parsed, no weight is read.

Tensors are stored sorted by name, so an expert's `down`, `gate` and `up` matrices usually follow each other in the
file: one range read brings the whole expert, and `gate` and `up` can be viewed as one matrix. Checkpoints where they do
not (other names, other orders, an expert cut by a shard boundary) give several ranges and are equally served. So do
checkpoints with quantised, fused, transposed or biased experts, which are decoded as they arrive (`coding.py`).

Shape suffixes: I expert width, H hidden size.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.target.coding import Coding, stored_as, unsupported_quantisation
from moexp.target.families import FAMILIES

ExpertKey = tuple[int, int]
"""(decoder layer as numbered in the checkpoint, expert)."""

PARTS = ("gate", "up", "down")

DTYPES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

STORED_DTYPES = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}

EXPERT_NAMES: dict[str, Mapping[str, str]] = {name: family.tensors for name, family in FAMILIES.items()}
"""model_type -> tensor name of each part, with `{layer}` and `{expert}` in place of the numbers."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One routed expert: `gate_up_2IH` is [2I, H] (gate rows first), `down_HI` is [H, I]; biases [2I] and [H], or None.

    From a store these are views into a slot, valid until the ticket is released.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those there are, in the order in which they lie in memory."""
        if self.gate_up_bias is None or self.down_bias is None:
            return self.gate_up, self.down
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` (inclusive) to `stop` (exclusive) of shard number `file`."""

    file: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor inside an expert's ranges: byte `offset` into range number `range`."""

    range: int
    offset: int


@dataclass(frozen=True, slots=True)
class ExpertLocation:
    """An expert's byte ranges (in ascending file order, touching tensors merged) and its parts within them."""

    ranges: tuple[ByteRange, ...]
    gate: Part
    up: Part
    down: Part
    width: int  # I
    hidden: int  # H


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor inside a coded expert's ranges: byte `offset` into range number `range`, shape and type."""

    range: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CodedLocation:
    """As `ExpertLocation`, of an expert that is decoded on arrival: its stored tensors by name."""

    ranges: tuple[ByteRange, ...]
    parts: Mapping[str, StoredPart]
    width: int  # I
    hidden: int  # H


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: int
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


class ExpertIndex:
    """Location of every routed expert of a checkpoint folder.

    Attributes:
        files: the shards that hold experts, by number.
        coding: how experts are stored, None: as plain matrices.
        locations: key -> where its bytes are, of plain experts.
        coded: the same of experts that have a coding.
        keys: all keys, sorted by layer, then expert.
        dtype: the experts' storage type; of coded ones the type they are served in unless another is asked for.
        expert_bytes: weight bytes of one expert in `dtype` (of the largest one, should layers differ).
        tensor_names: names of all routed expert tensors, so that a loader can leave them out.
    """

    def __init__(
        self,
        files: tuple[Path, ...],
        locations: dict[ExpertKey, ExpertLocation],
        dtype: torch.dtype,
        tensor_names: frozenset[str],
        coding: Coding | None = None,
        coded: dict[ExpertKey, CodedLocation] | None = None,
    ) -> None:
        self.files = files
        self.locations, self.coding, self.coded = locations, coding, coded or {}
        self.keys = tuple(sorted({**locations, **self.coded}))
        self.dtype = dtype
        self.tensor_names = tensor_names
        self.expert_bytes = max(self.elements(key) for key in self.keys) * dtype.itemsize

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layers, ascending."""
        return tuple(sorted({layer for layer, _ in self.keys}))

    @property
    def num_experts(self) -> int:
        """Experts of the layer that has most."""
        return 1 + max(expert for _, expert in self.keys)

    @property
    def biased(self) -> bool:
        """Whether the experts have biases."""
        return self.coding is not None and self.coding.biased

    def shape(self, key: ExpertKey) -> tuple[int, int]:
        """(I, H) of an expert."""
        at = self.coded[key] if self.coding else self.locations[key]
        return at.width, at.hidden

    def elements(self, key: ExpertKey) -> int:
        """Weights of an expert, biases included."""
        width, hidden = self.shape(key)
        return 3 * width * hidden + (2 * width + hidden if self.biased else 0)

    def converts_to(self, dtype: torch.dtype) -> bool:
        """Whether experts can be served from a disk in this type: as they are stored, or decoded to any."""
        return self.coding is not None or dtype == self.dtype

    @classmethod
    def from_checkpoint(cls, folder: Path | str, names: Mapping[str, str] | None = None) -> ExpertIndex:
        """Index a folder with `model.safetensors` or `model.safetensors.index.json` and its shards.

        Args:
            folder: a Hugging Face checkpoint folder.
            names: tensor names of the three parts, as in `EXPERT_NAMES`; by default those of the `model_type` in
                the folder's config.json, and the quantisation that it names.

        Raises:
            MoexpError: a shard is missing or not as long as its header says, an expert is incomplete, or experts are
                quantised in a way that is not supported.
        """
        folder = Path(folder)
        coding = None
        if names is None:
            names, coding = stored_as(folder)
        files = checkpoint_files(folder)
        tensors: dict[str, _Tensor] = {}
        for number, file in enumerate(files):
            for name, entry in read_header(file).items():
                begin, end = entry["data_offsets"]
                tensors[name] = _Tensor(number, begin, end, entry["dtype"], tuple(entry["shape"]))
        if any(name.endswith((".qweight", ".qzeros")) for name in tensors):
            raise unsupported_quantisation("packed integers (qweight)", folder)
        found, tensor_names = _find(tensors, coding.tensors if coding else names)
        if not found:
            raise MoexpError("no routed expert in the checkpoint", where=str(folder), valid=", ".join(names.values()))
        if coding is not None:
            coded = {key: _locate_coded(folder, key, parts, coding) for key, parts in found.items()}
            return cls(files, {}, torch.bfloat16, tensor_names, coding, coded)
        dtypes = {tensor.dtype for parts in found.values() for tensor in parts.values()}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            raise MoexpError(
                f"experts stored as {', '.join(sorted(dtypes))}",
                where=str(folder),
                valid=f"one of {', '.join(DTYPES)}",
            )
        locations = {}
        for (layer, expert), parts in found.items():
            _check_complete(folder, (layer, expert), parts, {part: names[part] for part in PARTS})
            locations[layer, expert] = _locate(folder, f"layer {layer}, expert {expert}", parts)
        return cls(files, locations, DTYPES[dtypes.pop()], tensor_names)


def _find(
    tensors: Mapping[str, _Tensor], names: Mapping[str, str]
) -> tuple[dict[ExpertKey, dict[str, _Tensor]], frozenset[str]]:
    """Each expert's tensors, and the names of them all. Where a layer's experts share a tensor, each has its part."""
    found: dict[ExpertKey, dict[str, _Tensor]] = {}
    tensor_names = []
    patterns = {part: _pattern(name) for part, name in names.items()}
    for name, tensor in tensors.items():
        for part, pattern in patterns.items():
            match = pattern.fullmatch(name)
            if not match:
                continue
            tensor_names.append(name)
            layer = int(match["layer"])
            if "expert" in pattern.groupindex:
                found.setdefault((layer, int(match["expert"])), {})[part] = tensor
                continue
            count = tensor.shape[0]
            step = (tensor.stop - tensor.start) // count
            for expert in range(count):
                start = tensor.start + expert * step
                one = _Tensor(tensor.file, start, start + step, tensor.dtype, tensor.shape[1:])
                found.setdefault((layer, expert), {})[part] = one
    return found, frozenset(tensor_names)


def _check_complete(folder: Path, key: ExpertKey, parts: Mapping[str, _Tensor], names: Mapping[str, str]) -> None:
    for part, name in names.items():
        if part not in parts:
            raise MoexpError(f"tensor {name.format(layer=key[0], expert=key[1])} is missing", where=str(folder))


def checkpoint_files(folder: Path | str) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder, sorted by name.

    Raises:
        MoexpError: there is none, the index cannot be read, or a shard that it names is missing.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise MoexpError("unreadable shard index", where=str(index), valid="JSON with a weight_map") from error
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        if not (folder / shard).is_file():
            raise MoexpError(
                f"shard {shard} is missing",
                where=str(folder),
                valid="model.safetensors, or an index and all its shards",
            )
    return tuple(folder / shard for shard in shards)


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
    """What stands before the data of a safetensors file.

    Args:
        entries: tensors, name -> {dtype, shape, data_offsets}, offsets counted from the data's start.
    """
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def iter_parts(at: ExpertLocation) -> Iterator[tuple[Part, tuple[int, int]]]:
    """The three parts in the order gate, up, down, each with its shape."""
    yield at.gate, (at.width, at.hidden)
    yield at.up, (at.width, at.hidden)
    yield at.down, (at.hidden, at.width)


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for number in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)", 1)
    return re.compile(escaped)


def _locate(folder: Path, which: str, parts: Mapping[str, _Tensor]) -> ExpertLocation:
    gate, up, down = (parts[part].shape for part in PARTS)
    if len(gate) != 2 or up != gate or down != gate[::-1]:
        raise MoexpError(
            f"{which}: shapes gate {list(gate)}, up {list(up)}, down {list(down)}",
            where=str(folder),
            valid="[I, H], [I, H], [H, I]",
        )
    ranges, placed = _merge(parts)
    return ExpertLocation(ranges, placed["gate"], placed["up"], placed["down"], gate[0], gate[1])


def _merge(parts: Mapping[str, _Tensor]) -> tuple[tuple[ByteRange, ...], dict[str, Part]]:
    """Byte ranges of an expert's tensors, in file order, touching ones merged, and each tensor's place in them."""
    ranges: list[ByteRange] = []
    placed: dict[str, Part] = {}
    for part, tensor in sorted(parts.items(), key=lambda item: (item[1].file, item[1].start)):
        if ranges and ranges[-1].file == tensor.file and ranges[-1].stop == tensor.start:
            ranges[-1] = ByteRange(tensor.file, ranges[-1].start, tensor.stop)
        else:
            ranges.append(ByteRange(tensor.file, tensor.start, tensor.stop))
        placed[part] = Part(len(ranges) - 1, tensor.start - ranges[-1].start)
    return tuple(ranges), placed


def _locate_coded(folder: Path, key: ExpertKey, parts: Mapping[str, _Tensor], coding: Coding) -> CodedLocation:
    _check_complete(folder, key, parts, coding.tensors)
    which = f"layer {key[0]}, expert {key[1]}"
    for part, tensor in parts.items():
        if tensor.dtype not in coding.stored[part]:
            raise MoexpError(
                f"{which}: {part} is stored as {tensor.dtype}", where=str(folder), valid=", ".join(coding.stored[part])
            )
    geometry = coding.shapes({part: tensor.shape for part, tensor in parts.items()})
    if geometry is None:
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise MoexpError(f"{which}: shapes {shapes} do not fit together as {coding.name}", where=str(folder))
    ranges, placed = _merge(parts)
    stored = {
        part: StoredPart(at.range, at.offset, parts[part].shape, STORED_DTYPES[parts[part].dtype])
        for part, at in placed.items()
    }
    return CodedLocation(ranges, stored, *geometry)
