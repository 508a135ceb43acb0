"""The one expert path: routing, the union of experts asked of the store once, each computed as it arrives, one
order of accumulation. AR decoding, drafting, verification and prefill all go through `MoELayer`.

Why a row's result does not depend on its block: every decoding step has the same number of rows, each expert is
computed for all of them, and a row's k experts are summed in descending gate order (ties: lower index), whenever
they arrived.

Shape suffixes: T rows of a block (padding included), B live ones of them, H hidden size, k experts a row uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moexp.runtime.engine.experts import Arrivals, ExpertCompute
from moexp.runtime.engine.routing import Route
from moexp.runtime.store.counters import Phase
from moexp.runtime.store.store import ExpertStore
from moexp.target.experts import ExpertKey, ExpertWeights


@dataclass(frozen=True)
class StepPath:
    """Which way through the MoE layers a step takes.

    Attributes:
        phase: what the store books its demands under.
        top_r: routed experts a row uses; None: the router's top-k.
        draft_experts: add the layer's draft expert.
        prefetch: announce the experts of the router's top-k beyond `top_r` as soon as the router has spoken.
        prefetch_top: end with the router's first so many; None: all of its top-k.
        whole_block: of a draft step: run the decoding step's full shape, for the target's own bits.

    Paper: DraftExpert eq. 5.
    """

    phase: Phase
    top_r: int | None = None
    draft_experts: bool = False
    prefetch: bool = False
    prefetch_top: int | None = None
    whole_block: bool = False


@dataclass
class _Rows:
    """One request's block in a layer: its input, its full top-k, and of these the ids and gates that are used."""

    x_TH: Tensor
    live: int
    ids_Tk: np.ndarray
    used_Tr: np.ndarray
    gates_Tr: Tensor

    @property
    def used(self) -> set[int]:
        """Experts that the live rows use."""
        return set(self.used_Tr[: self.live].ravel().tolist())


class MoELayer:
    """One MoE layer over an expert store.

    Args:
        layer: decoder layer number.
        route: how its router chooses.
        shared: its shared experts, [T, H] -> [T, H], or None.
        num_experts: E.
        compute: by row count, for the blocks of decoding steps; shared by all layers.
        drafting: the shared experts plus the layer's scaled draft expert, [T, H] -> [T, H], or None.
    """

    def __init__(
        self,
        layer: int,
        route: Route,
        shared: Callable[[Tensor], Tensor] | None,
        num_experts: int,
        compute: Mapping[int, ExpertCompute],
        drafting: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.route, self.shared, self.drafting, self.compute = route, shared, drafting, compute
        self.keys: list[ExpertKey] = [(layer, expert) for expert in range(num_experts)]
        self._slot_of_E = np.zeros(num_experts, dtype=np.int64)

    def __call__(
        self, inputs: Sequence[Tensor], lives: Sequence[int], path: StepPath, store: ExpertStore
    ) -> tuple[list[Tensor], list[np.ndarray]]:
        """The layer for the blocks of one or more requests: an expert that any of them needs is demanded once, and each
        block is computed as it would be alone.

        Args:
            inputs: [T, H] of each block.
            lives: leading rows of each that count; the rest is padding and demands nothing.

        Returns:
            outputs [T, H], and the router's full top-k of the live rows [B, k], by descending gate.

        Paper: DraftExpert eq. 1; DraftExpert eq. 2; EcoSpec eq. 1.
        """
        r, blocks = path.top_r, []
        for x_TH, live in zip(inputs, lives, strict=True):
            ids_Tk, gates_Tk = self.route(x_TH)
            blocks.append(_Rows(x_TH, live, ids_Tk, ids_Tk[:, :r], gates_Tk[:, :r]))
        ticket = store.request(self._union([rows.used_Tr[: rows.live] for rows in blocks]), path.phase)
        try:
            if path.prefetch and r is not None:
                beyond = [rows.ids_Tk[: rows.live, r : path.prefetch_top] for rows in blocks]
                if beyond[0].shape[1]:
                    store.prefetch(self._union(beyond))
            # What needs nothing of the store runs while reads are on their way.
            resident = [self._resident(x_TH, path) for x_TH in inputs]
            routed = self._routed(blocks, store.arrivals(ticket))
        finally:
            store.release(ticket)
        outputs = []
        for rows, resident_TH, routed_TH in zip(blocks, resident, routed, strict=True):
            routed_TH = routed_TH.to(rows.x_TH.dtype)
            outputs.append(routed_TH if resident_TH is None else resident_TH + routed_TH)
        return outputs, [rows.ids_Tk[: rows.live] for rows in blocks]

    def _union(self, blocks: Sequence[np.ndarray]) -> Sequence[ExpertKey]:
        keys = self.keys
        if len(blocks) == 1 and len(blocks[0]) == 1:
            return [keys[expert] for expert in blocks[0][0].tolist()]
        return [keys[expert] for expert in sorted({expert for ids in blocks for expert in ids.ravel().tolist()})]

    def _resident(self, x_TH: Tensor, path: StepPath) -> Tensor | None:
        if path.draft_experts:
            assert self.drafting is not None, "no draft expert is loaded"
            return self.drafting(x_TH)
        return self.shared(x_TH) if self.shared is not None else None

    def _routed(self, blocks: Sequence[_Rows], arrivals: Arrivals) -> list[Tensor]:
        if len(blocks) == 1:
            return [self._block(blocks[0], arrivals)]
        # The first block takes experts as they arrive; when it is through, all are in.
        arrived: list[tuple[ExpertKey, ExpertWeights]] = []
        outputs: list[Tensor] = []
        for rows in blocks:
            source: Arrivals = arrived if outputs else _collect(arrivals, arrived)
            used = rows.used
            outputs.append(self._block(rows, (item for item in source if item[0][1] in used)))
        return outputs

    def _block(self, rows: _Rows, arrivals: Arrivals) -> Tensor:
        x_TH, live = rows.x_TH, rows.live
        compute = self.compute.get(len(x_TH))
        if compute is not None:
            return compute.block(arrivals, x_TH, rows.used_Tr, rows.gates_Tr, live, self._slot_of_E)
        compute = next(iter(self.compute.values()))
        routed_TH = compute.chunk(arrivals, x_TH[:live], rows.used_Tr[:live], rows.gates_Tr[:live])
        if live < len(x_TH):
            routed_TH = torch.cat([routed_TH, routed_TH.new_zeros(len(x_TH) - live, routed_TH.shape[1])])
        return routed_TH


def _collect(
    arrivals: Arrivals, into: list[tuple[ExpertKey, ExpertWeights]]
) -> Iterator[tuple[ExpertKey, ExpertWeights]]:
    for item in arrivals:
        into.append(item)
        yield item
