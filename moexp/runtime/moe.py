"""The one expert path: routing, the union of experts asked of the store once, each computed as it arrives, one
order of accumulation. AR decoding, drafting, verification and prefill all go through `MoELayer`.

Why a row's result does not depend on its block: every decoding step has the same number of rows, each expert is
computed for all of them, and a row's k experts are summed in descending gate order (ties: lower index), whenever
they arrived.

Shape suffixes: T rows of a block (padding included), H hidden size, I expert width, E experts, k experts a row uses,
U experts in the union of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moexp.runtime.counters import Phase
from moexp.runtime.store import ExpertStore, Ticket
from moexp.target.experts import ExpertKey, ExpertWeights

UPCAST_MAX_ELEMENTS = 1 << 18
"""bf16 experts up to this many elements are computed in fp32 on a CPU: for a few rows, oneDNN's cost a call (about
20 us) exceeds that of converting so small a matrix and multiplying in fp32. The choice depends on the checkpoint alone,
so all methods make the same."""

Route = Callable[[Tensor], tuple[np.ndarray, Tensor]]
"""[T, H] -> expert ids [T, k] (int64, on the host) and gates [T, k] (fp32), by descending gate, ties by lower index."""


@dataclass(frozen=True)
class StepPath:
    """Which way through the MoE layers a step takes.

    Attributes:
        phase: what the store books its demands under.
        top_r: routed experts a row uses; None: the router's top-k.
        draft_experts: add the layer's draft expert (equation 5).
        prefetch: announce the experts of the router's top-k beyond `top_r` as soon as the router has spoken.
        whole_block: of a draft step: run the decoding step's full shape, for the target's own bits.
    """

    phase: Phase
    top_r: int | None = None
    draft_experts: bool = False
    prefetch: bool = False
    whole_block: bool = False


def sigmoid_route(router: Any) -> Route:
    """DeepSeek-V3's and GLM-4.5's routing without expert groups, restructured: two kernels, then the host.

    Selection is by sigmoid score + bias, the gate is the score (renormalised over the k, scaled).
    """
    weight, bias = router.weight, router.e_score_correction_bias.float().cpu().numpy()
    top_k, scaling = router.top_k, float(router.routed_scaling_factor)
    normalise = router.norm_topk_prob

    def route(x_TH: Tensor) -> tuple[np.ndarray, Tensor]:
        scores_TE = torch.sigmoid(F.linear(x_TH.float(), weight)).cpu().numpy()
        rows_T1 = np.arange(len(scores_TE))[:, None]
        chosen_Tk = np.argsort(-(scores_TE + bias), axis=-1, kind="stable")[:, :top_k]
        gates_Tk = scores_TE[rows_T1, chosen_Tk]
        order_Tk = np.lexsort((chosen_Tk, -gates_Tk))
        ids_Tk, gates_Tk = chosen_Tk[rows_T1, order_Tk], gates_Tk[rows_T1, order_Tk]
        if normalise:
            gates_Tk = gates_Tk / (gates_Tk.sum(-1, keepdims=True) + np.float32(1e-20))
        return ids_Tk, torch.from_numpy(gates_Tk * np.float32(scaling)).to(x_TH.device)

    return route


def module_route(router: nn.Module) -> Route:
    """transformers' own router module, its k experts put in order (they come unsorted)."""

    def route(x_TH: Tensor) -> tuple[np.ndarray, Tensor]:
        _, gates_Tk, ids_Tk = router(x_TH)
        ids_Tk, by_index = ids_Tk.sort(dim=-1)
        gates_Tk, by_gate = gates_Tk.float().gather(-1, by_index).sort(dim=-1, descending=True, stable=True)
        return ids_Tk.gather(-1, by_gate).cpu().numpy(), gates_Tk

    return route


def can_route_by_sigmoid(router: Any) -> bool:
    """Whether `sigmoid_route` says what this router says: no expert groups."""
    return getattr(router, "num_group", 1) == 1


class ExpertCompute:
    """Runs experts over a block and sums each row's. One for all layers: its buffers are reused.

    Args:
        rows: rows of a decoding block.
        max_union: experts in a decoding block's union at most.
        hidden, width: H and I.
        dtype, device: of the activations.
    """

    def __init__(
        self, *, rows: int, max_union: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.hidden = rows, hidden
        small = 3 * hidden * width <= UPCAST_MAX_ELEMENTS
        upcast = small and dtype == torch.bfloat16 and device.type == "cpu"
        self.dtype = torch.float32 if upcast else dtype
        self.outputs_UTH = torch.zeros(max_union, rows, hidden, dtype=self.dtype, device=device)
        self.slots = list(self.outputs_UTH)
        self.flat = self.outputs_UTH.view(max_union * rows, hidden)
        self.row_of = np.arange(rows)[:, None]

    def block(
        self, arrivals: Any, x_TH: Tensor, ids_Tk: np.ndarray, gates_Tk: Tensor, live: int, slot_of: np.ndarray
    ) -> Tensor:
        """A decoding block: every expert over all rows, padding included, so that all have one shape.

        Args:
            arrivals: (key, weights) of the union of the live rows' experts.
            x_TH: input of the layer's experts.
            ids_Tk, gates_Tk: of all rows, by descending gate.
            live: leading rows that are not padding.
            slot_of: [E] scratch, the position of each expert of the union in the buffer.

        Returns:
            [T, H] sum of gate times expert output (fp32; zero for padding).
        """
        x_TH = x_TH.to(self.dtype)
        for slot, (key, weights) in enumerate(arrivals):
            slot_of[key[1]] = slot
            torch.mm(self._inner(x_TH, weights), weights.down.to(self.dtype).t(), out=self.slots[slot])
        from_Tk = slot_of[ids_Tk] * self.rows + self.row_of
        if live < self.rows:
            from_Tk[live:] = 0
            gates_Tk[live:] = 0
        mine_TkH = self.flat.index_select(0, torch.from_numpy(from_Tk.ravel()).to(self.flat.device))
        return (mine_TkH.view(*ids_Tk.shape, -1) * gates_Tk[..., None]).sum(1)

    def rows_apart(self, arrivals: Any, x_TH: Tensor, ids_Tk: np.ndarray, gates_Tk: Tensor) -> Tensor:
        """A long chunk (prefill): each expert over only the rows that chose it. Same sum, other shapes."""
        rows, top_k = ids_Tk.shape
        order = np.argsort(ids_Tk.ravel(), kind="stable")
        bounds = np.searchsorted(ids_Tk.ravel()[order], np.arange(ids_Tk.max() + 2))
        outputs = torch.zeros(rows * top_k, self.hidden, dtype=self.dtype, device=x_TH.device)
        x_TH = x_TH.to(self.dtype)
        for (_, expert), weights in arrivals:
            mine = torch.from_numpy(order[bounds[expert] : bounds[expert + 1]]).to(x_TH.device)
            inner = self._inner(x_TH[mine // top_k], weights)
            outputs[mine] = F.linear(inner, weights.down.to(self.dtype))
        return (outputs.view(rows, top_k, -1) * gates_Tk[..., None]).sum(1)

    def _inner(self, x_TH: Tensor, weights: ExpertWeights) -> Tensor:
        gate_TI, up_TI = F.linear(x_TH, weights.gate_up.to(self.dtype)).chunk(2, dim=-1)
        return F.silu(gate_TI).mul_(up_TI)


class MoELayer:
    """One MoE layer over an expert store.

    Args:
        layer: decoder layer number.
        route: how its router chooses.
        shared: its shared experts, [T, H] -> [T, H], or None.
        num_experts: E.
        compute: by row count, for the blocks of decoding steps; shared by all layers.
        draft: the layer's draft expert, [T, H] -> scaled [T, H], or None.
    """

    def __init__(
        self,
        layer: int,
        route: Route,
        shared: Callable[[Tensor], Tensor] | None,
        num_experts: int,
        compute: Mapping[int, ExpertCompute],
        draft: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.route, self.shared, self.draft, self.compute = route, shared, draft, compute
        self.keys: list[ExpertKey] = [(layer, expert) for expert in range(num_experts)]
        self._slot_of = np.zeros(num_experts, dtype=np.int64)

    def __call__(self, x_TH: Tensor, live: int, path: StepPath, store: ExpertStore) -> tuple[Tensor, np.ndarray]:
        """Output [T, H] of the layer for the first `live` rows (the rest is padding and demands nothing).

        Returns:
            the output, and the router's full top-k of the live rows [live, k], by descending gate.
        """
        ids_Tk, gates_Tk = self.route(x_TH)
        used_Tr = ids_Tk if path.top_r is None else ids_Tk[:, : path.top_r]
        gates_Tr = gates_Tk if path.top_r is None else gates_Tk[:, : path.top_r]
        ticket = store.request(self._union(used_Tr[:live]), path.phase)
        try:
            if path.prefetch and used_Tr.shape[1] < ids_Tk.shape[1]:
                store.prefetch(self._union(ids_Tk[:live, used_Tr.shape[1] :]))
            resident_TH = self._resident(x_TH, path)
            routed_TH = self._routed(x_TH, used_Tr, gates_Tr, live, store, ticket)
        finally:
            store.release(ticket)
        routed_TH = routed_TH.to(x_TH.dtype)
        return routed_TH if resident_TH is None else resident_TH + routed_TH, ids_Tk[:live]

    def _union(self, ids: np.ndarray) -> Sequence[ExpertKey]:
        keys = self.keys
        if len(ids) == 1:
            return [keys[expert] for expert in ids[0].tolist()]
        return [keys[expert] for expert in sorted(set(ids.ravel().tolist()))]

    def _resident(self, x_TH: Tensor, path: StepPath) -> Tensor | None:
        """Shared experts and draft expert: needs nothing of the store, so it runs while reads are on their way."""
        output = self.shared(x_TH) if self.shared is not None else None
        if path.draft_experts:
            assert self.draft is not None, "no draft expert is loaded"
            drafted = self.draft(x_TH)
            output = drafted if output is None else output + drafted
        return output

    def _routed(
        self, x_TH: Tensor, ids: np.ndarray, gates: Tensor, live: int, store: ExpertStore, ticket: Ticket
    ) -> Tensor:
        arrivals = store.arrivals(ticket)
        compute = self.compute.get(len(x_TH))
        if compute is not None:
            return compute.block(arrivals, x_TH, ids, gates, live, self._slot_of)
        compute = next(iter(self.compute.values()))
        routed_TH = compute.rows_apart(arrivals, x_TH[:live], ids[:live], gates[:live])
        if live == len(x_TH):
            return routed_TH
        return torch.cat([routed_TH, routed_TH.new_zeros(len(x_TH) - live, routed_TH.shape[1])])
