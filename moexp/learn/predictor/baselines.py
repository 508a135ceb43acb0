"""What can be predicted without a model: by the token alone, and by what the token before it used.

Both are measured on the very tokens that a predictor is measured on, with the same sum: hits are experts that are in
both the predicted and the routed top-k, and overlap is hits over all routed ones (EcoSpec, appendix B.1).

Shapes: T tokens, L MoE layers, E experts a layer, k experts a token, U different tokens.
"""

from __future__ import annotations

import numpy as np

from moexp.learn.predictor.data import RoutingRows
from moexp.learn.predictor.loss import overlap_hits

CONTEXT_FREE, PREVIOUS_TOKEN = "context-free", "previous-token"


def baseline_hits(rows: RoutingRows, train_R: np.ndarray, held_R: np.ndarray) -> dict[str, np.ndarray]:
    """Hits [L] of each baseline on the held-out rows.

    `context-free`: the experts that a token id was routed to most often in the rows to train on; equally frequent ones,
    and ids that do not occur there, by how often the layer uses them, then by lower id.
    `previous-token`: the experts of the token before it in the same sample; of a sample's first token, those that the
    layer uses most.
    """
    train_T, held_T = rows.tokens_of(train_R), rows.tokens_of(held_R)
    experts, top_k = rows.geometry.num_experts, rows.geometry.top_k
    ids_U, held_token_T = np.unique(rows.token_T[held_T], return_inverse=True)
    index_T = np.searchsorted(ids_U, rows.token_T[train_T])
    index_T[index_T == len(ids_U)] = 0
    known_T = ids_U[index_T] == rows.token_T[train_T]
    first_T = rows.first_T[held_T]
    hits = {name: np.zeros(len(rows.geometry.layers), dtype=np.int64) for name in (CONTEXT_FREE, PREVIOUS_TOKEN)}
    for layer in range(len(rows.geometry.layers)):
        trained_Tk = rows.experts_TLk[train_T, layer].astype(np.int64)
        routed_Tk = rows.experts_TLk[held_T, layer].astype(np.int64)
        load_E = np.bincount(trained_Tk.ravel(), minlength=experts)
        flat = (index_T[known_T, None] * experts + trained_Tk[known_T]).ravel()
        counts_UE = np.bincount(flat, minlength=len(ids_U) * experts).reshape(len(ids_U), experts)
        ranked_UE = counts_UE + load_E / (load_E.sum() + 1)  # a load is less than one count
        best_Uk = np.argsort(-ranked_UE, axis=1, kind="stable")[:, :top_k]
        hits[CONTEXT_FREE][layer] = _layer_hits(best_Uk[held_token_T], routed_Tk)

        usual_k = np.argsort(-load_E, kind="stable")[:top_k]
        before_Tk = rows.experts_TLk[np.maximum(held_T - 1, 0), layer].astype(np.int64)
        hits[PREVIOUS_TOKEN][layer] = _layer_hits(np.where(first_T[:, None], usual_k, before_Tk), routed_Tk)
    return hits


def _layer_hits(predicted_Tk: np.ndarray, routed_Tk: np.ndarray) -> int:
    return int(overlap_hits(predicted_Tk[:, None], routed_Tk[:, None])[0])
