"""The multi-token-prediction head of DeepSeek-V3: one decoder layer of the target's own kind behind a projection.

    x = eh_proj [enorm(embedding of token t + 1); hnorm(state at t)]        (2H -> H)
    output = shared_head.norm(decoder layer(x)),    logits = the target's own lm_head(output)

The state at t is the target's final state, after its last norm; of a later step it is the head's output (DeepSeek
trains one step; feeding the output back is how one layer drafts further). The decoder layer is transformers' own
class: latent attention and experts where the target has them, or a dense one of the target's geometry.

Shape suffixes: B rows of a batch, T pairs, K pairs with those in the cache, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moexp.base.errors import MoexpError
from moexp.target.heads.head import Cache, DraftHead, RMSNorm, SharedParts, init_matrices


class MtpHead(DraftHead):
    """Its draft vocabulary is the target's.

    Args:
        config: the target's transformers config.
        shared: the target's embedding, output projection and rotary positions.
        layer: the decoder layer (`decoder_layer`).
    """

    def __init__(self, config: Any, shared: SharedParts, layer: nn.Module) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.vocab, self.hidden = config.vocab_size, hidden
        self.shared = shared
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = layer
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps)})

    def features(self, features_BTF: Tensor) -> Tensor:
        """The target's final states [B, T, H], as they are."""
        return features_BTF.to(self.eh_proj.weight.dtype)

    def step(
        self, embedded_BTH: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, mask_B1TK: Tensor, cache: Cache | None
    ) -> Tensor:
        """Gives hidden states after shared_head.norm."""
        x_BTH = self.eh_proj(torch.cat([self.enorm(embedded_BTH), self.hnorm(hidden_BTH)], dim=-1))
        x_BTH = self.layer(
            x_BTH,
            attention_mask=mask_B1TK,
            position_ids=positions_BT,
            cache=cache,
            use_cache=cache is not None,
            position_embeddings=self.shared.rotary(x_BTH, positions_BT),
        )
        return self.shared_head["norm"](x_BTH)

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        """fp32 logits [B, T, V] of the target's own output projection."""
        weight_VH = self.shared.lm_head.weight
        return F.linear(hidden_BTH.to(weight_VH.dtype), weight_VH, self.shared.lm_head.bias).float()


def shared_parts(model: Any) -> SharedParts:
    """What a head uses of a target: its embedding, its output projection, and rotary positions like its own."""
    embedding = model.get_input_embeddings()
    rotary = type(model.model.rotary_emb)(config=model.config).to(embedding.weight.device)
    return SharedParts(embedding, model.get_output_embeddings(), rotary)


def decoder_layer(config: Any, *, dense: bool) -> nn.Module:
    """One decoder layer of the target's kind, on `meta`: with experts, or dense with the target's dense width."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    if hasattr(small, "first_k_dense_replace"):
        small.first_k_dense_replace = int(dense)
    elif hasattr(small, "mlp_only_layers"):
        small.mlp_only_layers, small.decoder_sparse_step = ([0] if dense else []), 1
    elif dense:
        raise MoexpError(f"no dense decoder layer of model type {config.model_type!r}", valid="a layer with experts")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(small, attn_implementation="sdpa")
    layer: nn.Module = model.model.layers[0]
    left = [name for name, _ in layer.named_buffers() if name.split(".")[-1] not in ("e_score_correction_bias",)]
    assert not left, left
    return layer


def new_mtp_head(model: Any, *, dense: bool = True, seed: int = 0) -> MtpHead:
    """A head with random weights (fp32) for a target in memory."""
    layer = decoder_layer(model.config, dense=dense).float().to_empty(device="cpu")
    for _, buffer in layer.named_buffers():
        buffer.zero_()
    head = MtpHead(model.config, shared_parts(model), layer)
    init_matrices(head, torch.Generator().manual_seed(seed))
    return head


@torch.no_grad()
def start_from_target(head: MtpHead, norm: nn.Module) -> None:
    """Starts a head near the target: the last norm's weights, the state through eh_proj, and a decoder layer that adds
    nothing yet.
    """
    last: Any = norm.weight
    output: Any = head.shared_head["norm"]
    layer: Any = head.layer
    output.weight.copy_(last)
    head.eh_proj.weight.zero_()
    head.eh_proj.weight[:, head.hidden :].copy_(torch.eye(head.hidden))
    layer.self_attn.o_proj.weight.zero_()
    for name, parameter in layer.mlp.named_parameters():
        if "down_proj" in name:
            parameter.zero_()
