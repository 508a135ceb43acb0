"""The expert predictor: a small decoder-only backbone that tells which experts the target will route a token to.

A token goes through the target's own embedding (frozen) and a trained projection into the backbone; one linear head
gives a logit for every expert of every MoE layer (EcoSpec, section 4.1, equation 2). The predictor sees tokens only,
never a state of the target, so it can run before verification, over a whole draft tree at once.

Attention reaches `context` tokens back, in training because texts are cut to it, in decoding by a mask: positions are
rotary, so that every distance is one that was trained.

Shapes: B rows, T tokens, N nodes of a tree, C keys, V vocabulary, D the target's hidden size, H the predictor's,
L MoE layers, E experts a layer, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from moexp.data.traces import RoutingGeometry
from moexp.runtime.drafters.tree import DraftTree
from moexp.runtime.predictors.backbone import Backbone, fit_projection, rms

CHUNK = 512  # tokens of a text that are run at once


class RoutingPredictor(nn.Module):
    """Routing logits of tokens.

    Args:
        backbone: its parameters become the predictor's.
        embedding_VD: the target's, frozen; not part of the state.
        geometry: of the target.
        context: tokens that attention reaches back, the token itself included.
        dropout: on the backbone's input and output, while training.
    """

    def __init__(
        self,
        backbone: Backbone,
        embedding_VD: Tensor,
        geometry: RoutingGeometry,
        *,
        context: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.geometry, self.context, self.dropout = geometry, context, dropout
        self.backbone: Any = backbone.model
        self.backbone.get_input_embeddings().requires_grad_(False)  # never looked at: all input comes projected
        hidden = self.backbone.config.hidden_size
        self.embedding_VD: Tensor
        self.register_buffer("embedding_VD", embedding_VD.detach(), persistent=False)
        self.scale = 1.0 / rms(embedding_VD)  # the projection sees rows of size 1, whatever the target's embedding
        self.project = nn.Linear(embedding_VD.shape[1], hidden, bias=False)
        self.head = nn.Linear(hidden, len(geometry.layers) * geometry.num_experts)
        self._start(backbone.own_VH)

    def _start(self, own_VH: Tensor | None) -> None:
        hidden = self.project.weight.shape[0]
        size = 1.0 if own_VH is None else rms(own_VH)
        nn.init.normal_(self.project.weight, std=size * self.project.weight.shape[1] ** -0.5)
        nn.init.normal_(self.head.weight, std=0.02 * hidden**-0.5)
        nn.init.zeros_(self.head.bias)
        if own_VH is not None and len(own_VH) == len(self.embedding_VD):
            fitted_HD = fit_projection(self.embedding_VD.float() * self.scale, own_VH.float())
            if fitted_HD is not None:
                self.project.weight.data.copy_(fitted_HD)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.project.weight.device

    def hidden(
        self,
        ids_BT: Tensor,
        *,
        mask_TC: Tensor | None = None,
        positions_T: Tensor | None = None,
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """The backbone's output [B, T, H].

        Args:
            ids_BT: token ids.
            mask_TC: which keys each token sees, bool; those of the cache first. Causal by default.
            positions_T: position ids; from 0 by default.
            cache: extended by the T tokens.
        """
        dtype = self.project.weight.dtype
        rows_BTD = F.embedding(ids_BT, self.embedding_VD).to(dtype) * self.scale
        # Under autocast the projection gives bf16; the residual stream stays in the weights' type.
        input_BTH = self.project(rows_BTD).to(dtype)
        out = self.backbone(
            inputs_embeds=F.dropout(input_BTH, self.dropout, self.training),
            attention_mask=None if mask_TC is None else mask_TC[None, None],
            position_ids=None if positions_T is None else positions_T[None],
            use_cache=cache is not None,
            **({} if cache is None else {"cache": cache}),
        )
        hidden_BTH: Tensor = F.dropout(out.last_hidden_state, self.dropout, self.training)
        return hidden_BTH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Routing logits z [T, L, E] in fp32 (equation 2)."""
        shape = (len(self.geometry.layers), self.geometry.num_experts)
        return self.head(hidden_TH).float().unflatten(-1, shape)

    def cast(self, dtype: torch.dtype) -> RoutingPredictor:
        """Converts the weights. Not `to`: that would round rotary frequencies, and copy the target's embedding."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def trainable(self) -> dict[str, nn.Parameter]:
        """What is learned, by name: everything but the target's embedding."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def top_experts(logits_TLE: Tensor, top_k: int) -> Tensor:
    """Ids [T, L, k] of the predicted experts, likeliest first (equations 3 and 4: softmax keeps the order)."""
    return logits_TLE.topk(top_k, dim=-1).indices


class PredictorSession:
    """A predictor at work on one text, with keys and values of its own.

    `extend` only notes tokens; they are run with the next tree, in the same forward, or by `flush`.
    """

    def __init__(self, model: RoutingPredictor) -> None:
        self.model = model.eval()
        self.device = model.embedding_VD.device
        self.restart()

    def restart(self) -> None:
        """Forget the text."""
        self._cache = DynamicCache()
        self._held = 0  # tokens whose keys and values are in the cache
        self._waiting: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self._held + len(self._waiting)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        self._waiting += map(int, tokens)

    def flush(self) -> None:
        """Run what was added: a long prompt, before the time of a cycle is taken."""
        while self._waiting:
            self._run_chunk()

    def rollback(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        assert 0 <= length <= self.length
        del self._waiting[max(0, length - self._held) :]
        self._crop(min(length, self._held))

    def tree_logits(self, tree: DraftTree) -> Tensor:
        """Routing logits [N, L, E] of a tree's nodes, whose root follows the text; the text stays as it was."""
        while len(self._waiting) > CHUNK:
            self._run_chunk()
        waiting, nodes, start = len(self._waiting), len(tree), self._held
        rows = waiting + nodes
        # The tree hangs on the end of what waits, which is a chain.
        own_TT = np.tril(np.ones((rows, rows), dtype=bool))
        own_TT[waiting:, waiting:] = tree.mask()
        positions_T = np.concatenate([np.arange(start, start + waiting), tree.positions(start + waiting)])
        hidden_TH = self._run([*self._waiting, *tree.tokens_N.tolist()], own_TT, positions_T)
        self._waiting.clear()
        self._crop(start + waiting)
        with torch.no_grad():
            return self.model.logits(hidden_TH[waiting:])

    def predict_tree(self, tree: DraftTree) -> NDArray[np.int16]:
        """Predicted experts [N, L, k] of each node given its path (equation 4), likeliest first."""
        ids_NLk = top_experts(self.tree_logits(tree), self.model.geometry.top_k)
        return ids_NLk.cpu().numpy().astype(np.int16)

    def _run_chunk(self) -> None:
        part = self._waiting[:CHUNK]
        rows = len(part)
        self._run(part, np.tril(np.ones((rows, rows), dtype=bool)), np.arange(self._held, self._held + rows))
        del self._waiting[:rows]

    @torch.no_grad()
    def _run(self, tokens: list[int], own_TT: NDArray[np.bool_], positions_T: NDArray[np.integer]) -> Tensor:
        """Hidden states [T, H] of tokens that see the text behind them and, of each other, what `own_TT` says."""
        start = self._held
        keys_C = np.concatenate([np.arange(start), positions_T])
        near_TC = positions_T[:, None] - keys_C < self.model.context
        near_TC[:, start:] &= own_TT
        hidden_BTH = self.model.hidden(
            torch.tensor([tokens], device=self.device),
            mask_TC=torch.from_numpy(near_TC).to(self.device),
            positions_T=torch.from_numpy(positions_T).to(self.device),
            cache=self._cache,
        )
        self._held += len(tokens)
        return hidden_BTH[0]

    def _crop(self, length: int) -> None:
        self._cache.crop(length - self._held)
        self._held = length
