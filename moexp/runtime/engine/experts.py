"""Running experts over a block of rows.

Shape suffixes: T rows of a block (padding included), H hidden size, I expert width, E experts, k experts a row uses,
U experts in the union of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moexp.target.experts import ExpertKey, ExpertWeights

UPCAST_MAX_ELEMENTS = 1 << 18
"""bf16 experts up to this many elements are computed in fp32 on a CPU: for a few rows, oneDNN's cost a call (about
20 us) exceeds that of converting so small a matrix and multiplying in fp32. The choice depends on the checkpoint alone,
so all methods make the same."""

Arrivals = Iterable[tuple[ExpertKey, ExpertWeights]]
"""Experts in any order."""

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
        gating: Gating,
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
        arrivals: Arrivals,
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
        outputs_TkH = self.outputs_UTH[torch.from_numpy(slots_Tk).to(x_TH.device), self.rows_T1]
        return (outputs_TkH * gates_Tk[..., None]).sum(1)

    def _run(self, arrivals: Arrivals, x_TH: Tensor, slot_of_E: np.ndarray) -> None:
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

    def _run_small(self, arrivals: Arrivals, x_TH: Tensor, slot_of_E: np.ndarray) -> None:
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

    def chunk(self, arrivals: Arrivals, x_TH: Tensor, ids_Tk: np.ndarray, gates_Tk: Tensor) -> Tensor:
        """A long chunk (prefill): each expert over only the rows that chose it. Same sum, other shapes."""
        rows, top_k = ids_Tk.shape
        order = np.argsort(ids_Tk.ravel(), kind="stable")
        bounds = np.searchsorted(ids_Tk.ravel()[order], np.arange(ids_Tk.max() + 2))
        outputs = torch.zeros(rows * top_k, self.hidden, dtype=self.dtype, device=x_TH.device)
        x_TH = x_TH.to(self.dtype)
        for (_, expert), weights in arrivals:
            chosen = torch.from_numpy(order[bounds[expert] : bounds[expert + 1]]).to(x_TH.device)
            gate_up, down, *biases = (tensor.to(self.dtype) for tensor in weights.tensors)
            gate_up_bias, down_bias = biases or (None, None)
            gate_TI, up_TI = F.linear(x_TH[chosen // top_k], gate_up, gate_up_bias).chunk(2, dim=-1)
            acted_TI = torch.empty_like(up_TI)
            self.gating(gate_TI, up_TI, acted_TI)
            outputs[chosen] = F.linear(acted_TI, down, down_bias)
        return (outputs.view(rows, top_k, -1) * gates_Tk[..., None]).sum(1)
