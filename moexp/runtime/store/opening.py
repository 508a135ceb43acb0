"""Opening a store over a checkpoint: resident, in host memory, or on disk."""

from __future__ import annotations

import torch

from moexp.base.errors import MoexpError
from moexp.runtime.store.disk import FileSource, hold_shards, open_shards
from moexp.runtime.store.host import HostSource, load_experts
from moexp.runtime.store.policies import CachePolicy, make_policy
from moexp.runtime.store.slot_store import SlotStore
from moexp.runtime.store.store import ExpertStore, ResidentStore
from moexp.runtime.store.transfer import Source, StoreOptions
from moexp.target.experts import ExpertIndex, ExpertWeights
from moexp.target.pack_format import PackedIndex

READ_SPLITS = 2
"""Pieces an expert is read in from disk: more keep the device busy until the last expert of a small request is in."""

STORE_KINDS = ("resident", "host", "disk")


def open_store(
    index: ExpertIndex,
    kind: str = "disk",
    *,
    policy: CachePolicy | None = None,
    budget_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    options: StoreOptions = StoreOptions(),  # noqa: B008
) -> ExpertStore:
    """Open a store over a checkpoint's experts.

    Args:
        index: where the experts are.
        kind: "resident" (all in the device's memory, nothing moves), "host" (all in host memory, copied into slots) or
            "disk" (read into slots).
        policy: what stays from one cycle to the next; by default nothing. A resident store needs none.
        dtype: of the weights served; by default as stored. The disk store decodes what is quantised or laid out
            otherwise; plain weights it serves as they are.
        device: where they are served; the disk store serves host memory only.
        budget_bytes, options: as in `SlotStore`.

    Raises:
        MoexpError: an unknown kind, a budget below one expert, a dtype or device that the kind cannot serve, or a shard
            that cannot be opened.
    """
    if kind not in STORE_KINDS:
        raise MoexpError(f"unknown store kind {kind!r}", where="store.kind", valid=", ".join(STORE_KINDS))
    dtype, device = dtype or index.dtype, torch.device(device)
    if kind == "disk" and (not index.converts_to(dtype) or device.type != "cpu"):
        wanted = f"experts on disk are {index.dtype} and go to host memory, not {dtype} on {device}"
        raise MoexpError(wanted, where="store.kind", valid="host, resident")
    if kind == "resident":
        loaded = load_experts(index, dtype).items()
        return ResidentStore({key: ExpertWeights(*(part.to(device) for part in w.tensors)) for key, w in loaded})
    return SlotStore(
        _source(index, kind, dtype, device, 1 if options.pacer else READ_SPLITS),
        policy or make_policy("none"),
        dtype=dtype,
        expert_bytes=index.expert_bytes * dtype.itemsize // index.dtype.itemsize,
        budget_bytes=budget_bytes,
        device=device,
        options=options,
    )


def _source(index: ExpertIndex, kind: str, dtype: torch.dtype, device: torch.device, splits: int) -> Source:
    if kind == "disk":
        return FileSource(index, open_shards(index.files), splits, dtype)
    if device.type == "cuda":
        from moexp.runtime.store.cuda import PinnedSource  # only where there is a GPU

        return PinnedSource(load_experts(index, dtype), device)
    if isinstance(index, PackedIndex) and dtype == index.dtype:
        return FileSource(index, hold_shards(index.files))
    return HostSource(load_experts(index, dtype))
