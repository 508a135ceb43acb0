"""Where each routed expert's bytes lie in a checkpoint: safetensors headers are parsed, no weight is read.

Tensors are stored sorted by name, so an expert's `down`, `gate` and `up` matrices usually follow each other in the
file: one range read brings the whole expert, and `gate` and `up` can be viewed as one matrix. Checkpoints where they do
not (other names, other orders, an expert cut by a shard boundary) give several ranges and are equally served.

Shape suffixes: I expert width, H hidden size.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moexp.errors import MoexpError

ExpertKey = tuple[int, int]
"""(decoder layer as numbered in the checkpoint, expert)."""

PARTS = ("gate", "up", "down")

DTYPES: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

_MLP = "model.layers.{layer}.mlp.experts.{expert}."
_GATED_MLP = {
    "gate": _MLP + "gate_proj.weight",
    "up": _MLP + "up_proj.weight",
    "down": _MLP + "down_proj.weight",
}

EXPERT_NAMES: dict[str, Mapping[str, str]] = {
    "deepseek_v2": _GATED_MLP,
    "deepseek_v3": _GATED_MLP,
    "glm4_moe": _GATED_MLP,
    "qwen3_moe": _GATED_MLP,
}
"""model_type -> tensor name of each part, with `{layer}` and `{expert}` in place of the numbers."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One routed expert: `gate_up_2IH` is [2I, H] (gate rows first), `down_HI` is [H, I].

    From a store these are views into a slot, valid until the ticket is released.
    """

    gate_up: Tensor
    down: Tensor


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
        locations: key -> where its bytes are.
        keys: all keys, sorted by layer, then expert.
        dtype: the experts' storage type.
        expert_bytes: weight bytes of one expert (of the largest one, should layers differ).
        tensor_names: names of all routed expert tensors, so that a loader can leave them out.
    """

    def __init__(
        self,
        files: tuple[Path, ...],
        locations: dict[ExpertKey, ExpertLocation],
        dtype: torch.dtype,
        tensor_names: frozenset[str],
    ) -> None:
        self.files = files
        self.locations = locations
        self.keys = tuple(sorted(locations))
        self.dtype = dtype
        self.tensor_names = tensor_names
        self.expert_bytes = max(3 * at.width * at.hidden * dtype.itemsize for at in locations.values())

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layers, ascending."""
        return tuple(sorted({layer for layer, _ in self.keys}))

    @property
    def num_experts(self) -> int:
        """Experts of the layer that has most."""
        return 1 + max(expert for _, expert in self.keys)

    @classmethod
    def from_checkpoint(cls, folder: Path | str, names: Mapping[str, str] | None = None) -> ExpertIndex:
        """Index a folder with `model.safetensors` or `model.safetensors.index.json` and its shards.

        Args:
            folder: a Hugging Face checkpoint folder.
            names: tensor names of the three parts, as in `EXPERT_NAMES`; by default those of the `model_type` in
                the folder's config.json.

        Raises:
            MoexpError: a shard is missing or not as long as its header says, or an expert is incomplete.
        """
        folder = Path(folder)
        if names is None:
            names = EXPERT_NAMES[_model_type(folder)]
        files = checkpoint_files(folder)
        tensors: dict[str, _Tensor] = {}
        for number, file in enumerate(files):
            for name, entry in read_header(file).items():
                begin, end = entry["data_offsets"]
                tensors[name] = _Tensor(number, begin, end, entry["dtype"], tuple(entry["shape"]))
        return cls._build(folder, files, tensors, names)

    @classmethod
    def _build(
        cls, folder: Path, files: tuple[Path, ...], tensors: dict[str, _Tensor], names: Mapping[str, str]
    ) -> ExpertIndex:
        found: dict[ExpertKey, dict[str, _Tensor]] = {}
        tensor_names = []
        patterns = {part: _pattern(names[part]) for part in PARTS}
        for name, tensor in tensors.items():
            for part, pattern in patterns.items():
                match = pattern.fullmatch(name)
                if match:
                    found.setdefault((int(match["layer"]), int(match["expert"])), {})[part] = tensor
                    tensor_names.append(name)
        if not found:
            raise MoexpError("no routed expert in the checkpoint", where=str(folder), valid=", ".join(names.values()))
        dtypes = {tensor.dtype for parts in found.values() for tensor in parts.values()}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            raise MoexpError(
                f"experts stored as {', '.join(sorted(dtypes))}",
                where=str(folder),
                valid=f"one of {', '.join(DTYPES)}",
            )
        locations = {}
        for (layer, expert), parts in found.items():
            for part in PARTS:
                if part not in parts:
                    missing = names[part].format(layer=layer, expert=expert)
                    raise MoexpError(f"tensor {missing} is missing", where=str(folder))
            locations[layer, expert] = _locate(folder, f"layer {layer}, expert {expert}", parts)
        return cls(files, locations, DTYPES[dtypes.pop()], frozenset(tensor_names))


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


def iter_parts(at: ExpertLocation) -> Iterator[tuple[Part, tuple[int, int]]]:
    """The three parts in the order gate, up, down, each with its shape."""
    yield at.gate, (at.width, at.hidden)
    yield at.up, (at.width, at.hidden)
    yield at.down, (at.hidden, at.width)


def _model_type(folder: Path) -> str:
    config = folder / "config.json"
    try:
        model_type = json.loads(config.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise MoexpError("no readable config.json", where=str(folder)) from error
    if model_type not in EXPERT_NAMES:
        raise MoexpError(
            f"model_type {model_type!r} is not supported", where=str(config), valid=", ".join(EXPERT_NAMES)
        )
    return model_type


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
    ranges: list[ByteRange] = []
    placed: dict[str, Part] = {}
    for part, tensor in sorted(parts.items(), key=lambda item: (item[1].file, item[1].start)):
        if ranges and ranges[-1].file == tensor.file and ranges[-1].stop == tensor.start:
            ranges[-1] = ByteRange(tensor.file, ranges[-1].start, tensor.stop)
        else:
            ranges.append(ByteRange(tensor.file, tensor.start, tensor.stop))
        placed[part] = Part(len(ranges) - 1, tensor.start - ranges[-1].start)
    return ExpertLocation(tuple(ranges), placed["gate"], placed["up"], placed["down"], gate[0], gate[1])
