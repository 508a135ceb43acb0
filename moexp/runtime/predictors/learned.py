"""The learned predictor: a small decoder-only backbone that predicts which experts the target will route a token to.

A token goes through the target's own embedding (frozen) and a trained projection into the backbone; one linear head
gives a logit for every expert of every MoE layer. The predictor sees tokens only, never a state of the target, so it
can run before verification, over all nodes of a draft tree at once.

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
from moexp.runtime.drafters.draft_tree import DraftTree
from moexp.runtime.predictors.backbone import Backbone, fit_projection, rms
from moexp.runtime.predictors.predictor import Routing

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
        """Routing logits z [T, L, E] in fp32.

        Paper: EcoSpec eq. 2.
        """
        shape = (len(self.geometry.layers), self.geometry.num_experts)
        return self.head(hidden_TH).float().unflatten(-1, shape)

    def cast(self, dtype: torch.dtype) -> RoutingPredictor:
        """Converts the weights. Not `to`: that would round rotary frequencies, and copy the target's embedding."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that are trained, by name: all but the target's embedding."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def top_experts(logits_TLE: Tensor, top_k: int) -> Tensor:
    """Ids [T, L, k] of the predicted experts, likeliest first; the paper's softmax would keep the order.

    Paper: EcoSpec eq. 3; EcoSpec eq. 4.
    """
    return logits_TLE.topk(top_k, dim=-1).indices


class LearnedPredictor:
    """A trained predictor at work on one request, with keys and values of its own.

    Emitted tokens are run with the next tree, in the same forward.

    Paper: EcoSpec section 4.1.
    """

    def __init__(self, model: RoutingPredictor) -> None:
        self.model = model.eval()
        self.device = model.embedding_VD.device
        self.begin([-1], 0)

    def begin(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """See `ExpertPredictor`; runs the prompt, which otherwise would be part of the first cycle's time."""
        self._cache = DynamicCache()
        self._cached = 0  # tokens whose keys and values are in the cache
        self._waiting = [int(token) for token in prompt_ids[:-1]]
        self._pending = int(prompt_ids[-1])
        while self._waiting:
            self._run_chunk()

    def predict(self, tree: DraftTree) -> Routing:
        """See `ExpertPredictor`.

        Paper: EcoSpec eq. 4.
        """
        assert int(tree.tokens_N[0]) == self._pending, "the root is not the pending token"
        return top_experts(self.tree_logits(tree), self.model.geometry.top_k).cpu().numpy().astype(np.int16)

    def commit(self, tokens: Sequence[int]) -> None:
        """See `ExpertPredictor`."""
        self._waiting += map(int, [self._pending, *tokens[:-1]])
        self._pending = int(tokens[-1])

    def tree_logits(self, tree: DraftTree) -> Tensor:
        """Routing logits [N, L, E] of a tree's nodes, whose root follows the text before the pending token."""
        while len(self._waiting) > CHUNK:
            self._run_chunk()
        waiting, nodes, start = len(self._waiting), len(tree), self._cached
        rows = waiting + nodes
        # The tree hangs on the end of what waits, which is a chain.
        own_TT = np.tril(np.ones((rows, rows), dtype=bool))
        own_TT[waiting:, waiting:] = tree.mask()
        positions_T = np.concatenate([np.arange(start, start + waiting), start + waiting + tree.depths_N])
        hidden_TH = self._run([*self._waiting, *tree.tokens_N.tolist()], own_TT, positions_T)
        self._waiting.clear()
        self._crop(start + waiting)
        with torch.no_grad():
            return self.model.logits(hidden_TH[waiting:])

    def _run_chunk(self) -> None:
        part = self._waiting[:CHUNK]
        rows = len(part)
        self._run(part, np.tril(np.ones((rows, rows), dtype=bool)), np.arange(self._cached, self._cached + rows))
        del self._waiting[:rows]

    @torch.no_grad()
    def _run(self, tokens: list[int], own_TT: NDArray[np.bool_], positions_T: NDArray[np.integer]) -> Tensor:
        """Hidden states [T, H] of tokens that see the cached text and, of each other, those in `own_TT`."""
        start = self._cached
        keys_C = np.concatenate([np.arange(start), positions_T])
        near_TC = positions_T[:, None] - keys_C < self.model.context
        near_TC[:, start:] &= own_TT
        hidden_BTH = self.model.hidden(
            torch.tensor([tokens], device=self.device),
            mask_TC=torch.from_numpy(near_TC).to(self.device),
            positions_T=torch.from_numpy(positions_T).to(self.device),
            cache=self._cache,
        )
        self._cached += len(tokens)
        return hidden_BTH[0]

    def _crop(self, length: int) -> None:
        self._cache.crop(length - self._cached)
        self._cached = length
