"""Where each routed expert's bytes lie in a checkpoint: safetensors headers are parsed, no weight is read.

Tensors are stored sorted by name, so an expert's `down`, `gate` and `up` matrices usually follow each other in the
file: one range read brings the expert, and `gate` and `up` can be viewed as one matrix. Checkpoints where they do
not (other names, other orders, an expert cut by a shard boundary) give several ranges and are equally served. So do
checkpoints with quantised, fused, transposed or biased experts, which are decoded as they arrive (`coding.py`).

Shape suffixes: I expert width, H hidden size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.target.coding import Coding, stored_as, unsupported_quantisation
from moexp.target.shards import DTYPES, STORED_DTYPES, StoredTensor, checkpoint_files, list_tensors, shapes_of

ExpertKey = tuple[int, int]
"""(decoder layer as numbered in the checkpoint, expert)."""

PARTS = ("gate", "up", "down")


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
        """The matrices and biases, in the order in which they lie in memory."""
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
    """A tensor inside an expert's ranges: byte `offset` into range number `range`, shape and storage type."""

    range: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExpertLocation:
    """An expert's byte ranges (in ascending file order, touching tensors merged) and its stored tensors within them:
    `gate`, `up` and `down`, or those of the index's coding.
    """

    ranges: tuple[ByteRange, ...]
    parts: Mapping[str, Part]
    width: int  # I
    hidden: int  # H


class ExpertIndex:
    """Location of every routed expert of a checkpoint folder.

    Attributes:
        files: the shards that hold experts, by number.
        coding: how experts are stored, None: as plain matrices.
        locations: key -> where its bytes are.
        keys: all keys, sorted by layer, then expert.
        dtype: the experts' storage type; of coded ones the type they are served in by default.
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
    ) -> None:
        self.files = files
        self.locations, self.coding = locations, coding
        self.keys = tuple(sorted(locations))
        self.dtype = dtype
        self.tensor_names = tensor_names
        self.expert_bytes = max(self.elements(key) for key in self.keys) * dtype.itemsize

    @property
    def biased(self) -> bool:
        """Whether the experts have biases."""
        return self.coding is not None and self.coding.biased

    def shape(self, key: ExpertKey) -> tuple[int, int]:
        """(I, H) of an expert."""
        location = self.locations[key]
        return location.width, location.hidden

    def elements(self, key: ExpertKey) -> int:
        """Weights of an expert, biases included."""
        width, hidden = self.shape(key)
        return 3 * width * hidden + (2 * width + hidden if self.biased else 0)

    @property
    def stored_bytes(self) -> int:
        """Bytes that bringing an expert in from disk moves (the largest, should they differ), alignment aside."""
        if self.coding is None:
            return self.expert_bytes
        return max(sum(span.length for span in at.ranges) for at in self.locations.values())

    def converts_to(self, dtype: torch.dtype) -> bool:
        """Whether experts can be served from a disk in this type: as they are stored, or decoded to any."""
        return self.coding is not None or dtype == self.dtype

    @classmethod
    def from_checkpoint(cls, folder: Path | str, names: Mapping[str, str] | None = None) -> ExpertIndex:
        """Index a folder with `model.safetensors` or `model.safetensors.index.json` and its shards.

        Args:
            folder: a Hugging Face checkpoint folder.
            names: tensor names of the three parts, as in `families.Family.tensors`; by default those of the
                `model_type` in the folder's config.json, and the quantisation that it names.

        Raises:
            MoexpError: a shard is missing or not as long as its header says, an expert is incomplete, or experts are
                quantised in a way that is not supported.
        """
        folder, coding = Path(folder), None
        if names is None:
            names, coding = stored_as(folder)
        tensors = list_tensors(folder)
        if any(name.endswith((".qweight", ".qzeros")) for name in tensors):
            raise unsupported_quantisation("packed integers (qweight)", folder)
        names = coding.tensors if coding else names
        experts, tensor_names = _by_expert(tensors, names)
        if not experts:
            raise MoexpError("no routed expert in the checkpoint", where=str(folder), valid=", ".join(names.values()))
        dtypes = {tensor.dtype for parts in experts.values() for tensor in parts.values()}
        if coding is None and (len(dtypes) > 1 or not dtypes <= set(DTYPES)):
            what, valid = f"experts stored as {', '.join(sorted(dtypes))}", f"one of {', '.join(DTYPES)}"
            raise MoexpError(what, where=str(folder), valid=valid)
        files = checkpoint_files(folder)
        numbers = {file: number for number, file in enumerate(files)}
        locations = {}
        for (layer, expert), parts in experts.items():
            for part, name in names.items():
                if part not in parts:
                    missing = name.format(layer=layer, expert=expert)
                    raise MoexpError(f"tensor {missing} is missing", where=str(folder))
            try:
                width, hidden = _plain_shape(parts) if coding is None else _coded_shape(parts, coding)
            except MoexpError as error:
                what = f"layer {layer}, expert {expert}: {error.what}"
                raise MoexpError(what, where=str(folder), valid=error.valid) from None
            locations[layer, expert] = ExpertLocation(*_merge(parts, numbers), width, hidden)
        return cls(files, locations, torch.bfloat16 if coding else DTYPES[dtypes.pop()], tensor_names, coding)


def _by_expert(
    tensors: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> tuple[dict[ExpertKey, dict[str, StoredTensor]], frozenset[str]]:
    """Each expert's tensors, and the names of them all. Where a layer's experts share a tensor, each has its part."""
    experts: dict[ExpertKey, dict[str, StoredTensor]] = {}
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
                experts.setdefault((layer, int(match["expert"])), {})[part] = tensor
                continue
            for expert in range(tensor.shape[0]):
                experts.setdefault((layer, expert), {})[part] = tensor.part(expert)
    return experts, frozenset(tensor_names)


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for number in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)", 1)
    return re.compile(escaped)


def _plain_shape(parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
    """(I, H) of an expert of three plain matrices."""
    gate, up, down = (parts[part].shape for part in PARTS)
    if len(gate) != 2 or up != gate or down != gate[::-1]:
        what = f"shapes gate {list(gate)}, up {list(up)}, down {list(down)}"
        raise MoexpError(what, valid="[I, H], [I, H], [H, I]")
    return gate[0], gate[1]


def _coded_shape(parts: Mapping[str, StoredTensor], coding: Coding) -> tuple[int, int]:
    """(I, H) of an expert that is decoded on arrival."""
    for part, tensor in parts.items():
        if tensor.dtype not in coding.stored[part]:
            raise MoexpError(f"{part} is stored as {tensor.dtype}", valid=", ".join(coding.stored[part]))
    geometry = coding.shapes(shapes_of(parts))
    if geometry is None:
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise MoexpError(f"shapes {shapes} do not fit together as {coding.name}")
    return geometry


def _merge(
    parts: Mapping[str, StoredTensor], numbers: Mapping[Path, int]
) -> tuple[tuple[ByteRange, ...], dict[str, Part]]:
    """Byte ranges of an expert's tensors, in file order, touching ones merged, and each tensor's offset in them."""
    ranges: list[ByteRange] = []
    located: dict[str, Part] = {}
    for part, tensor in sorted(parts.items(), key=lambda item: (numbers[item[1].file], item[1].start)):
        file = numbers[tensor.file]
        if ranges and ranges[-1].file == file and ranges[-1].stop == tensor.start:
            ranges[-1] = ByteRange(file, ranges[-1].start, tensor.stop)
        else:
            ranges.append(ByteRange(file, tensor.start, tensor.stop))
        offset = tensor.start - ranges[-1].start
        located[part] = Part(len(ranges) - 1, offset, tensor.shape, STORED_DTYPES[tensor.dtype])
    return tuple(ranges), located
