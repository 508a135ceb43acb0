"""Which experts a row uses, and with which gates: transformers' own router modules, or a restructured one.

Shape suffixes: T rows of a block, H hidden size, E experts, k experts a row uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Route = Callable[[Tensor], tuple[np.ndarray, Tensor]]
"""[T, H] -> expert ids [T, k] (int64, on the host) and gates [T, k] (fp32), by descending gate, ties by lower index."""


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
