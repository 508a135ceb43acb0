"""`moexp pack`: re-lays the routed experts of a checkpoint into aligned records, quantised where asked.

The work goes on in a hidden folder beside the destination, a layer at a time, each of them renamed into place with its
checksums once it is on disk; the folder takes its name when everything is there. Run again after an interruption, it
goes on behind the last finished layer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from torch import Tensor

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.config.locations import artifact_path
from moexp.config.recipe import Recipe
from moexp.config.run_folder import locked
from moexp.runtime.store.opening import open_store
from moexp.target.experts import ExpertIndex, ExpertKey, ExpertWeights
from moexp.target.load import PADDED_FROM, checkpoint_fingerprint, read_config, target_identity
from moexp.target.opening import find_target
from moexp.target.pack_format import (
    CONFIG_KEY,
    MANIFEST,
    QUANTS,
    PackManifest,
    RecordShape,
    check_quant,
    checksum,
    is_packed,
    layer_file,
    read_index,
    read_manifest,
)
from moexp.target.shards import checkpoint_files, header_bytes, read_header
from moexp.target.spec import MoESpec

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_COPY_BYTES = 16 << 20
_BATCH_BYTES = 256 << 20  # of experts in memory while packing, at most (but one a thread)
_PLAN = "plan.json"


def pack_checkpoint(
    source: Path, destination: Path, quant: str = "none", *, advance: Callable[[int], None] = lambda done: None
) -> PackManifest:
    """Packs the checkpoint in `source` into the folder `destination`, unless it is there already.

    Args:
        source: a checkpoint folder, padded or not.
        quant: a key of `QUANTS`.
        advance: called with the number of experts done.

    Raises:
        MoexpError: an unknown quantisation or one that the geometry does not allow, a source that is packed or
            unreadable, a destination that holds something else, another process at it, or a disk that is full.
    """
    check_quant(quant)
    if is_packed(source):
        raise MoexpError("the checkpoint is packed already", where=str(source), valid="its source")
    config, index = read_config(source), ExpertIndex.from_checkpoint(source)
    spec = MoESpec.from_config(config)
    # Plain experts as they are stored; those that are decoded, in the type that the checkpoint is computed in.
    dtype = index.dtype if index.coding is None else getattr(config, "dtype", None) or index.dtype
    fingerprint = checkpoint_fingerprint(source)
    if _finished(destination, fingerprint, quant):
        return read_manifest(destination)
    keys = [key for key in index.keys if key[0] in spec.moe_layers]
    width, hidden = _one_shape(index, keys, source)
    size = RecordShape(quant, dtype, hidden, width, index.biased).record_bytes
    work = destination.with_name(f".{destination.name}.packing")
    with atomic.writing(destination):
        work.mkdir(parents=True, exist_ok=True)
    with locked(work), atomic.writing(destination):
        _begin(work, {"source": fingerprint, "quant": quant})
        layers = {layer: [key for key in keys if key[0] == layer] for layer in spec.moe_layers}
        records = _Records(work, index, dtype, quant, size)
        _demand_space(records, layers, source)
        sums, done = {}, 0
        for layer, members in layers.items():
            saved = _saved_sums(records, layer, len(members))
            sums[layer] = saved or _write_layer(records, members, partial(_advance_from, advance, done))
            done += len(members)
            advance(done)
        manifest = PackManifest(
            source=fingerprint,
            identity=target_identity(source),
            quant=quant,
            dtype=str(dtype).removeprefix("torch."),
            hidden=hidden,
            width=width,
            record_bytes=size,
            checksums=sums,
            biased=index.biased,
        )
        _write_rest(work, source, {name for name in index.tensor_names if _layer_of(name) in spec.moe_layers})
        _write_config(work, source, manifest)
        for file in [work / _PLAN, work / ".lock", *work.glob("*.sums.json")]:
            file.unlink()
        atomic.publish_folder(work, destination)
    return manifest


def pack_stage(recipe: Recipe, quant: str, out: Path | None = None) -> Path:
    """Packs the target that a recipe decodes from (the padded one, where it asks for that); returns the pack's folder.

    Raises:
        MoexpError: the target is not built, or see `pack_checkpoint`.
    """
    check_quant(quant)
    source = find_target(recipe, padded=True)
    destination = out or pack_folder(recipe, quant)
    index = read_index(source)
    with stage(f"Pack experts ({quant})", len(index.keys)) as advance:
        pack_checkpoint(source, destination, quant, advance=advance)
    return destination


def pack_folder(recipe: Recipe, quant: str) -> Path:
    """Where a pack of the recipe's target lies."""
    folder = artifact_path("packs", recipe, "target", "paths.target", "seed")
    return folder.with_name(f"{folder.name}-{'packed' if quant == 'none' else quant}")


def encode(weights: ExpertWeights, quant: str, size: int) -> np.ndarray:
    """The record of an expert: uint8 [size].

    Raises:
        MoexpError: weights that are not finite, which no block format holds.
    """
    record = np.zeros(size, dtype=np.uint8)
    begin = 0
    for tensor in weights.tensors:
        packed = _encode_matrix(tensor, quant if tensor.ndim > 1 else "none")  # biases stay as they are
        record[begin : begin + packed.size] = packed
        begin += packed.size
    return record


def _encode_matrix(matrix: Tensor, quant: str) -> np.ndarray:
    kind = QUANTS[quant]
    if kind is None:
        return matrix.contiguous().view(-1).view(torch.uint8).numpy()
    values = matrix.float().numpy()
    if not np.isfinite(values).all():
        raise MoexpError("an expert has weights that are not finite", where="--quant", valid="none")
    return quants.quantize(values, kind).reshape(-1)


@dataclass(frozen=True)
class _Records:
    """Where a pack's records go, and what they are made of."""

    work: Path
    index: ExpertIndex
    dtype: torch.dtype
    quant: str
    size: int


def _one_shape(index: ExpertIndex, keys: list[ExpertKey], source: Path) -> tuple[int, int]:
    shapes = set(map(index.shape, keys))
    if len(shapes) != 1:
        raise MoexpError("experts of different shapes", where=str(source), valid="all of one shape")
    return shapes.pop()


def _finished(destination: Path, fingerprint: str, quant: str) -> bool:
    """Whether the very pack is there; MoexpError where something else is."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    if destination.is_dir() and is_packed(destination):
        manifest = read_manifest(destination)
        if (manifest.source, manifest.quant) == (fingerprint, quant):
            return True
    raise MoexpError("something else is there", where=str(destination), valid="a new folder, or this pack's own")


def _begin(work: Path, plan: dict[str, str]) -> None:
    """Keeps what an interrupted run of the same plan left, and nothing else."""
    try:
        same = json.loads((work / _PLAN).read_text()) == plan
    except (OSError, ValueError):
        same = False
    for entry in work.iterdir():
        keep = same and (entry.name == _PLAN or entry.name.startswith("experts-layer-"))
        if not keep and entry.name != ".lock":
            entry.unlink()
    atomic.write_json(work / _PLAN, plan)


def _saved_sums(records: _Records, layer: int, experts: int) -> tuple[str, ...] | None:
    """Checksums of a layer that is on disk, or None. They are written after its records."""
    file = records.work / layer_file(layer)
    try:
        sums = json.loads(_sums_file(file).read_text())
    except (OSError, ValueError):
        return None
    complete = file.is_file() and file.stat().st_size == experts * records.size and len(sums) == experts
    return tuple(sums) if complete else None


def _advance_from(advance: Callable[[int], None], base: int, done: int) -> None:
    advance(base + done)


def _sums_file(file: Path) -> Path:
    return file.with_suffix(".sums.json")


def _demand_space(records: _Records, layers: dict[int, list[ExpertKey]], source: Path) -> None:
    missing = [len(keys) for layer, keys in layers.items() if _saved_sums(records, layer, len(keys)) is None]
    needed, free = sum(missing) * records.size, shutil.disk_usage(records.work).free
    if needed > free:
        raise MoexpError(
            f"packing {source.name} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            where=str(records.work.parent),
            valid="free some space, or point --out at another disk",
        )


def _write_layer(records: _Records, keys: list[ExpertKey], advance: Callable[[int], None]) -> tuple[str, ...]:
    index, dtype, size = records.index, records.dtype, records.size
    file = records.work / layer_file(keys[0][0])
    temp = file.with_suffix(".part")
    threads = os.cpu_count() or 1
    batch = max(threads, _BATCH_BYTES // (max(map(index.elements, keys)) * dtype.itemsize + size))
    sums: list[str] = []
    # Reading through a store serves every storage format that a target can have.
    with open(temp, "wb") as out, open_store(index, "disk", dtype=dtype) as store, ThreadPoolExecutor(threads) as pool:
        for begin in range(0, len(keys), batch):
            store.begin_cycle()
            ticket = store.request(keys[begin : begin + batch], "prefill")
            try:
                arrived = {
                    key: pool.submit(encode, weights, records.quant, size) for key, weights in store.arrivals(ticket)
                }
                for key in ticket.keys:
                    record = arrived[key].result()
                    sums.append(checksum(record))
                    out.write(record.data)
                    advance(len(sums))
            finally:
                store.release(ticket)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temp, file)
    atomic.write_json(_sums_file(file), sums)
    return tuple(sums)


def _write_rest(work: Path, source: Path, routed: set[str]) -> None:
    """Everything but the routed experts: shards without any are linked, of the others the bytes are copied."""
    placed: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(checkpoint_files(source), 1):
        header = read_header(shard)
        names = [name for name in header if name not in routed]
        if not names:
            continue
        file = work / f"model-rest-{number:05d}.safetensors"
        if len(names) == len(header):
            _link(shard.resolve(), file)
        else:
            _copy_tensors(shard, file, {name: header[name] for name in names})
        placed.update(dict.fromkeys(names, file.name))
        total += file.stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    atomic.write_json(work / "model.safetensors.index.json", index)


def _link(shard: Path, file: Path) -> None:
    try:
        os.link(shard, file)
    except OSError:  # another file system, or one without links
        shutil.copyfile(shard, file)


def _copy_tensors(shard: Path, file: Path, entries: dict[str, dict[str, Any]]) -> None:
    header, offset = {}, 0
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    for name, entry in ordered:
        begin, end = entry["data_offsets"]
        header[name] = {**entry, "data_offsets": [offset, offset + end - begin]}
        offset += end - begin
    with open(shard, "rb") as read, open(file, "wb") as write:
        write.write(header_bytes(header))
        for _, entry in ordered:
            begin, end = entry["data_offsets"]
            read.seek(begin)
            while begin < end:
                chunk = read.read(min(_COPY_BYTES, end - begin))
                if not chunk:
                    raise MoexpError("the shard ends too early", where=str(shard))
                begin += write.write(chunk)


def _write_config(work: Path, source: Path, manifest: PackManifest) -> None:
    """Config, tokenizer and manifest. The config names the manifest, and so does the fingerprint made of it."""
    for entry in source.iterdir():
        wanted = entry.suffix in {".json", ".jinja", ".model"} and not (work / entry.name).exists()
        if wanted and not entry.name.endswith(".safetensors.index.json"):
            shutil.copyfile(entry, work / entry.name)
    config = json.loads((source / "config.json").read_text())
    config.pop(PADDED_FROM, None)
    if manifest.quant == "none":
        config[PADDED_FROM] = manifest.identity  # the same function, in other bytes
    config[CONFIG_KEY] = {"quant": manifest.quant, "manifest": manifest.digest()}
    atomic.write_json(work / "config.json", config)
    atomic.write_json(work / MANIFEST, manifest.model_dump(mode="json"))


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None
