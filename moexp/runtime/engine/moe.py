"""The one expert path: routing, the union of experts asked of the store once, each computed as it arrives, one
order of accumulation. AR decoding, drafting, verification and prefill all go through `MoELayer`.

Why a row's result does not depend on its block: every decoding step has the same number of rows, each expert is
computed for all of them, and a row's k experts are summed in descending gate order (ties: lower index), whenever
they arrived.

Shape suffixes: T rows of a block (padding included), H hidden size, I expert width, E experts, k experts a row uses,
U experts in the union of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moexp.runtime.store.counters import Phase
from moexp.runtime.store.store import ExpertStore, Ticket
from moexp.target.experts import ExpertKey, ExpertWeights

UPCAST_MAX_ELEMENTS = 1 << 18
"""bf16 experts up to this many elements are computed in fp32 on a CPU: for a few rows, oneDNN's cost a call (about
20 us) exceeds that of converting so small a matrix and multiplying in fp32. The choice depends on the checkpoint alone,
so all methods make the same."""

Route = Callable[[Tensor], tuple[np.ndarray, Tensor]]
"""[T, H] -> expert ids [T, k] (int64, on the host) and gates [T, k] (fp32), by descending gate, ties by lower index."""


Gating = Callable[[Tensor, Tensor, Tensor], object]
"""(gate, up, where the result goes), all of one shape: what stands between an expert's two multiplications."""


def silu_gating(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """silu(gate) * up."""
    torch.mul(F.silu(gate), up, out=out)


def clamped_gating(alpha: float, limit: float) -> Gating:
    """GPT-OSS's: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above, up on both sides."""

    def gating(gate: Tensor, up: Tensor, out: Tensor) -> None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        torch.mul(gate * torch.sigmoid(gate * alpha), up + 1, out=out)

    return gating


@dataclass(frozen=True)
class StepPath:
    """Which way through the MoE layers a step takes.

    Attributes:
        phase: what the store books its demands under.
        top_r: routed experts a row uses; None: the router's top-k.
        draft_experts: add the layer's draft expert (equation 5).
        prefetch: announce the experts of the router's top-k beyond `top_r` as soon as the router has spoken.
        prefetch_top: end with the router's first so many; None: all of its top-k.
        whole_block: of a draft step: run the decoding step's full shape, for the target's own bits.
    """

    phase: Phase
    top_r: int | None = None
    draft_experts: bool = False
    prefetch: bool = False
    prefetch_top: int | None = None
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
        gating: between an expert's two multiplications.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_union: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        gating: Gating = silu_gating,
    ) -> None:
        self.gating = gating
        self.rows, self.hidden, self.width = rows, hidden, width
        small = 3 * hidden * width <= UPCAST_MAX_ELEMENTS
        self.upcast = small and dtype == torch.bfloat16 and device.type == "cpu"
        self.dtype = torch.float32 if self.upcast else dtype

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=self.dtype, device=device)

        # Each expert writes into its own part of these; the views are made once. Large experts are the left factor:
        # a right one, which oneDNN reorders at every call, should be the few rows and not the weights.
        if self.upcast:
            self.inner_UT2I = buffer(max_union, rows, 2 * width)
            self.acted_UTI = buffer(max_union, rows, width)
            self.outputs_UTH = buffer(max_union, rows, hidden)
            self.inner, self.acted, self.outputs = list(self.inner_UT2I), list(self.acted_UTI), list(self.outputs_UTH)
        else:
            self.inner_2IT, self.acted_IT = buffer(2 * width, rows), buffer(width, rows)
            outputs_UHT = buffer(max_union, hidden, rows)
            self.outputs, self.outputs_UTH = list(outputs_UHT), outputs_UHT.transpose(1, 2)
        self.rows_T1 = torch.arange(rows, device=device)[:, None]
        # One expert's weights in fp32: reused by all, so that they stay in the processor's cache.
        self.gate_up_2IH = buffer(2 * width, hidden) if self.upcast else None
        self.down_HI = buffer(hidden, width) if self.upcast else None

    def block(
        self,
        arrivals: Iterable[tuple[ExpertKey, ExpertWeights]],
        x_TH: Tensor,
        ids_Tk: np.ndarray,
        gates_Tk: Tensor,
        live: int,
        slot_of_E: np.ndarray,
    ) -> Tensor:
        """A decoding block: every expert over all rows, padding included, so that all have one shape.

        Args:
            arrivals: (key, weights) of the union of the live rows' experts.
            x_TH: input of the layer's experts.
            ids_Tk, gates_Tk: of all rows, by descending gate; those of padding are overwritten.
            live: leading rows that are not padding.
            slot_of_E: scratch, each expert's position in the buffers.

        Returns:
            [T, H] sum of gate times expert output (zero for padding).
        """
        run = self._run_small if self.upcast else self._run
        run(arrivals, x_TH.to(self.dtype), slot_of_E)
        slots_Tk = slot_of_E[ids_Tk]
        if live < self.rows:
            slots_Tk[live:] = 0
            gates_Tk[live:] = 0
        mine_TkH = self.outputs_UTH[torch.from_numpy(slots_Tk).to(x_TH.device), self.rows_T1]
        return (mine_TkH * gates_Tk[..., None]).sum(1)

    def _run(self, arrivals: Iterable[tuple[ExpertKey, ExpertWeights]], x_TH: Tensor, slot_of_E: np.ndarray) -> None:
        """Each expert from end to end as it arrives, while others are still on their way."""
        x_HT = x_TH.t().contiguous()
        gate_IT, up_IT = self.inner_2IT.split(self.width)
        for slot, (key, weights) in enumerate(arrivals):
            slot_of_E[key[1]] = slot
            torch.mm(weights.gate_up, x_HT, out=self.inner_2IT)
            if weights.gate_up_bias is not None:
                self.inner_2IT.add_(weights.gate_up_bias[:, None])
            self.gating(gate_IT, up_IT, self.acted_IT)
            torch.mm(weights.down, self.acted_IT, out=self.outputs[slot])
            if weights.down_bias is not None:
                self.outputs[slot].add_(weights.down_bias[:, None])

    def _run_small(
        self, arrivals: Iterable[tuple[ExpertKey, ExpertWeights]], x_TH: Tensor, slot_of_E: np.ndarray
    ) -> None:
        """Kernel calls, not memory, are what small experts cost: the activation is done once for all of them."""
        assert self.gate_up_2IH is not None and self.down_HI is not None
        downs: list[tuple[Tensor, Tensor | None]] = []
        gate_up_H2I, down_IH = self.gate_up_2IH.t(), self.down_HI.t()
        for slot, (key, weights) in enumerate(arrivals):
            slot_of_E[key[1]] = slot
            self.gate_up_2IH.copy_(weights.gate_up)
            torch.mm(x_TH, gate_up_H2I, out=self.inner[slot])
            if weights.gate_up_bias is not None:
                self.inner[slot].add_(weights.gate_up_bias)
            downs.append((weights.down, weights.down_bias))
        gate_UTI, up_UTI = self.inner_UT2I[: len(downs)].split(self.width, dim=-1)
        self.gating(gate_UTI, up_UTI, self.acted_UTI[: len(downs)])
        for slot, (down, bias) in enumerate(downs):
            self.down_HI.copy_(down)
            torch.mm(self.acted[slot], down_IH, out=self.outputs[slot])
            if bias is not None:
                self.outputs[slot].add_(bias)

    def rows_apart(
        self,
        arrivals: Iterable[tuple[ExpertKey, ExpertWeights]],
        x_TH: Tensor,
        ids_Tk: np.ndarray,
        gates_Tk: Tensor,
    ) -> Tensor:
        """A long chunk (prefill): each expert over only the rows that chose it. Same sum, other shapes."""
        rows, top_k = ids_Tk.shape
        order = np.argsort(ids_Tk.ravel(), kind="stable")
        bounds = np.searchsorted(ids_Tk.ravel()[order], np.arange(ids_Tk.max() + 2))
        outputs = torch.zeros(rows * top_k, self.hidden, dtype=self.dtype, device=x_TH.device)
        x_TH = x_TH.to(self.dtype)
        for (_, expert), weights in arrivals:
            mine = torch.from_numpy(order[bounds[expert] : bounds[expert + 1]]).to(x_TH.device)
            gate_up, down, *biases = (tensor.to(self.dtype) for tensor in weights.tensors)
            gate_up_bias, down_bias = biases or (None, None)
            gate_TI, up_TI = F.linear(x_TH[mine // top_k], gate_up, gate_up_bias).chunk(2, dim=-1)
            acted_TI = torch.empty_like(up_TI)
            self.gating(gate_TI, up_TI, acted_TI)
            outputs[mine] = F.linear(acted_TI, down, down_bias)
        return (outputs.view(rows, top_k, -1) * gates_Tk[..., None]).sum(1)


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

    def __call__(self, x_TH: Tensor, live: int, path: StepPath, store: ExpertStore) -> tuple[Tensor, np.ndarray]:
        """Output [T, H] of the layer for the first `live` rows (the rest is padding and demands nothing).

        Returns:
            the output, and the router's full top-k of the live rows [live, k], by descending gate.
        """
        return self.many([x_TH], [live], path, store)[0]

    def many(
        self, blocks: Sequence[Tensor], lives: Sequence[int], path: StepPath, store: ExpertStore
    ) -> list[tuple[Tensor, np.ndarray]]:
        """The same for the blocks of several requests: what any of them needs is asked for once, and each is computed
        as it would be alone.
        """
        routed = [self.route(x_TH) for x_TH in blocks]
        r = path.top_r
        used = [ids_Tk if r is None else ids_Tk[:, :r] for ids_Tk, _ in routed]
        live_ids = [ids_Tr[:live] for ids_Tr, live in zip(used, lives, strict=True)]
        ticket = store.request(self._union(live_ids), path.phase)
        try:
            if path.prefetch and r is not None:
                beyond = [ids_Tk[:live, r : path.prefetch_top] for (ids_Tk, _), live in zip(routed, lives, strict=True)]
                if beyond[0].shape[1]:
                    store.prefetch(self._union(beyond))
            resident = [self._resident(x_TH, path) for x_TH in blocks]
            outputs = self._routed(blocks, routed, used, live_ids, store, ticket)
        finally:
            store.release(ticket)
        found = []
        for x_TH, live, resident_TH, routed_TH, (ids_Tk, _) in zip(
            blocks, lives, resident, outputs, routed, strict=True
        ):
            routed_TH = routed_TH.to(x_TH.dtype)
            found.append((routed_TH if resident_TH is None else resident_TH + routed_TH, ids_Tk[:live]))
        return found

    def _union(self, blocks: Sequence[np.ndarray]) -> Sequence[ExpertKey]:
        keys = self.keys
        if len(blocks) == 1 and len(blocks[0]) == 1:
            return [keys[expert] for expert in blocks[0][0].tolist()]
        return [keys[expert] for expert in sorted({expert for ids in blocks for expert in ids.ravel().tolist()})]

    def _resident(self, x_TH: Tensor, path: StepPath) -> Tensor | None:
        """Shared experts and draft expert: needs nothing of the store, so it runs while reads are on their way."""
        if path.draft_experts:
            assert self.drafting is not None, "no draft expert is loaded"
            return self.drafting(x_TH)
        return self.shared(x_TH) if self.shared is not None else None

    def _routed(
        self,
        blocks: Sequence[Tensor],
        routed: Sequence[tuple[np.ndarray, Tensor]],
        used: Sequence[np.ndarray],
        live_ids: Sequence[np.ndarray],
        store: ExpertStore,
        ticket: Ticket,
    ) -> list[Tensor]:
        arrivals = store.arrivals(ticket)
        kept: list[tuple[ExpertKey, ExpertWeights]] = []
        outputs = []
        for place, (x_TH, (_, gates_Tk), ids_Tr, live_Lr) in enumerate(
            zip(blocks, routed, used, live_ids, strict=True)
        ):
            gates_Tr, live = gates_Tk[:, : ids_Tr.shape[1]], len(live_Lr)
            source: Iterable[tuple[ExpertKey, ExpertWeights]] = arrivals
            if len(blocks) > 1:  # the first block takes experts as they arrive; the others find them all there
                mine = set(live_Lr.ravel().tolist())
                source = (item for item in (_keeping(arrivals, kept) if place == 0 else kept) if item[0][1] in mine)
            compute = self.compute.get(len(x_TH))
            if compute is not None:
                outputs.append(compute.block(source, x_TH, ids_Tr, gates_Tr, live, self._slot_of_E))
                continue
            compute = next(iter(self.compute.values()))
            routed_TH = compute.rows_apart(source, x_TH[:live], ids_Tr[:live], gates_Tr[:live])
            if live < len(x_TH):
                routed_TH = torch.cat([routed_TH, routed_TH.new_zeros(len(x_TH) - live, routed_TH.shape[1])])
            outputs.append(routed_TH)
        return outputs


def _keeping(
    arrivals: Iterable[tuple[ExpertKey, ExpertWeights]], into: list[tuple[ExpertKey, ExpertWeights]]
) -> Iterable[tuple[ExpertKey, ExpertWeights]]:
    for item in arrivals:
        into.append(item)
        yield item
