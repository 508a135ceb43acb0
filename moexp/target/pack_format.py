"""Packed checkpoints: every routed expert is one aligned record, as it was stored or in blocks of Q8_0 or Q4_0.

A packed folder is a checkpoint folder with `moexp_pack.json` (the manifest), one `experts-layer-NNN.bin` a MoE layer,
and everything but the routed experts in safetensors. A record is the rows of gate, up and down, one after the other,
biases as they are where there are any, and zeros up to a full page, so that one O_DIRECT read brings an expert and
nothing else.

Shape suffixes: I expert width, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from pydantic import BaseModel

from moexp.base.errors import MoexpError
from moexp.target.experts import ByteRange, ExpertIndex, ExpertKey, ExpertLocation
from moexp.target.shards import list_tensors

MANIFEST = "moexp_pack.json"
CONFIG_KEY = "moexp_pack"
FORMAT = 1
ALIGN = 4096

QUANTS: dict[str, GGMLQuantizationType | None] = {
    "none": None,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}
"""Name -> the block format of llama.cpp, or None where experts stay as they were stored."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
_REMEDY = "a folder that `moexp pack` wrote; pack the source again"


class PackManifest(BaseModel, frozen=True, extra="forbid"):
    """What a pack holds.

    Attributes:
        source: fingerprint of the checkpoint that was packed.
        identity: which function that checkpoint computes (`load.target_identity`).
        quant: a key of `QUANTS`.
        dtype: type that the experts were served in, before they were packed.
        hidden, width: H and I.
        record_bytes: of an expert, padding included.
        checksums: MoE layer -> XXH3-128 of every record, by expert.
        biased: whether experts have biases.
        format: version of this format.
    """

    source: str
    identity: str
    quant: str
    dtype: str
    hidden: int
    width: int
    record_bytes: int
    checksums: dict[int, tuple[str, ...]]
    biased: bool = False
    format: int = FORMAT

    def digest(self) -> str:
        """Hex sha256 over all of it; the config of a packed checkpoint repeats it."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> RecordShape:
        """What a record holds."""
        return RecordShape(self.quant, _DTYPES[self.dtype], self.hidden, self.width, self.biased)


def layer_file(layer: int) -> str:
    """Name of the file with a layer's records."""
    return f"experts-layer-{layer:03d}.bin"


@dataclass(frozen=True)
class RecordShape:
    """An expert's record: a key of `QUANTS`, the type before packing, H, I, and whether there are biases."""

    quant: str
    dtype: torch.dtype
    hidden: int
    width: int
    biased: bool

    @property
    def down_offset(self) -> int:
        """Byte where the down matrix starts."""
        return self._matrix_bytes(2 * self.width, self.hidden)

    @property
    def content_bytes(self) -> int:
        """Bytes without padding.

        Raises:
            MoexpError: rows of the matrices are not a multiple of blocks.
        """
        biases = (2 * self.width + self.hidden) * self.dtype.itemsize if self.biased else 0
        return self.down_offset + self._matrix_bytes(self.hidden, self.width) + biases

    @property
    def record_bytes(self) -> int:
        """Bytes, padding included."""
        return -(-self.content_bytes // ALIGN) * ALIGN

    def _matrix_bytes(self, rows: int, columns: int) -> int:
        kind = QUANTS[self.quant]
        if kind is None:
            return rows * columns * self.dtype.itemsize
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if columns % block:
            what = f"rows of {columns} weights are no whole number of {self.quant} blocks"
            valid = f"none, or a hidden size and an expert width that are multiples of {block}"
            raise MoexpError(what, where="--quant", valid=valid)
        return rows * columns // block * block_bytes


def checksum(record: Any) -> str:
    """Hex XXH3-128 of a record (any buffer)."""
    return xxhash.xxh3_128_hexdigest(record)


def check_quant(quant: str) -> None:
    """MoexpError unless `quant` is a key of `QUANTS`."""
    if quant not in QUANTS:
        raise MoexpError(f"unknown quantisation {quant!r}", where="--quant", valid=", ".join(QUANTS))


class PackedIndex(ExpertIndex):
    """Where the experts of a packed checkpoint are.

    `locations` give each expert's record, which has no parts: read it through the stores.

    Attributes:
        manifest: of the pack.
        down_offset: byte of a record where the down matrix starts.
    """

    def __init__(self, folder: Path, manifest: PackManifest) -> None:
        self.manifest = manifest
        record = manifest.record
        self.down_offset, length = record.down_offset, record.content_bytes
        layers = sorted(manifest.checksums)
        locations: dict[ExpertKey, ExpertLocation] = {}
        for number, layer in enumerate(layers):
            for expert in range(len(manifest.checksums[layer])):
                start = expert * manifest.record_bytes
                span = ByteRange(number, start, start + length)
                locations[layer, expert] = ExpertLocation((span,), {}, manifest.width, manifest.hidden)
        files = tuple(folder / layer_file(layer) for layer in layers)
        super().__init__(files, locations, record.dtype, frozenset())

    @property
    def quant(self) -> str:
        """A key of `QUANTS`."""
        return self.manifest.quant

    @property
    def biased(self) -> bool:
        """Whether the experts have biases."""
        return self.manifest.biased

    @property
    def stored_bytes(self) -> int:
        """Bytes that bringing in an expert moves."""
        return self.manifest.record_bytes

    def check(self, key: ExpertKey, record: Any) -> None:
        """Whether these bytes are the record of that expert.

        Raises:
            MoexpError: they are not.
        """
        layer, expert = key
        if checksum(record) != self.manifest.checksums[layer][expert]:
            file = next(file for file in self.files if file.name == layer_file(layer))
            raise MoexpError(
                f"the record of expert {expert} is corrupt", where=str(file), valid="pack the source again"
            )


def is_packed(folder: Path | str) -> bool:
    """Whether a checkpoint folder is a pack, complete or not."""
    if (Path(folder) / MANIFEST).is_file():
        return True
    try:
        return CONFIG_KEY in json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def read_manifest(folder: Path | str) -> PackManifest:
    """The manifest of a packed folder, checked against its config and the sizes of its files; no record is read.

    Raises:
        MoexpError: it is missing or unreadable, of another checkpoint or version, or a file is missing or cut.
    """
    folder = Path(folder)
    try:
        manifest = PackManifest.model_validate_json((folder / MANIFEST).read_text())
        promised = json.loads((folder / "config.json").read_text())[CONFIG_KEY]["manifest"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoexpError("no readable manifest of a pack", where=str(folder / MANIFEST), valid=_REMEDY) from error
    if manifest.format != FORMAT or manifest.quant not in QUANTS or manifest.dtype not in _DTYPES:
        raise MoexpError(f"a pack of format {manifest.format}", where=str(folder), valid=f"format {FORMAT}")
    expected = manifest.record.record_bytes
    if promised != manifest.digest() or expected != manifest.record_bytes or not manifest.checksums:
        raise MoexpError("the manifest is not of this checkpoint", where=str(folder / MANIFEST), valid=_REMEDY)
    for layer, sums in manifest.checksums.items():
        file = folder / layer_file(layer)
        size, wanted = file.stat().st_size if file.is_file() else 0, len(sums) * manifest.record_bytes
        if size != wanted:
            raise MoexpError(f"{file.name} has {size} bytes of {wanted}", where=str(folder), valid=_REMEDY)
    return manifest


def read_index(folder: Path | str) -> ExpertIndex:
    """The index of a checkpoint folder, packed or not.

    Raises:
        MoexpError: see `read_manifest` and `ExpertIndex.from_checkpoint`.
    """
    folder = Path(folder)
    return PackedIndex(folder, read_manifest(folder)) if is_packed(folder) else ExpertIndex.from_checkpoint(folder)


def weight_sizes(folder: Path | str) -> dict[str, int]:
    """Sizes of a checkpoint's weights as they are stored.

    Returns:
        `expert_width`; `routed_bytes` of all routed experts; `rest_bytes` of all other tensors.

    Raises:
        MoexpError: see `ExpertIndex.from_checkpoint`.
    """
    index = read_index(folder)
    sizes = {name: tensor.stop - tensor.start for name, tensor in list_tensors(Path(folder)).items()}
    rest = sum(size for name, size in sizes.items() if name not in index.tensor_names)
    routed = sum(sizes.values()) - rest
    if isinstance(index, PackedIndex):
        routed = index.stored_bytes * len(index.keys)
    width, _ = index.shape(index.keys[0])
    return {"expert_width": width, "routed_bytes": routed, "rest_bytes": rest}


def refuse_packed(folder: Path | str) -> None:
    """MoexpError where a folder is packed: training and tracing run the full model from its own shards."""
    if is_packed(folder):
        raise MoexpError("training and tracing read no packed checkpoint", where=str(folder), valid="its source")
