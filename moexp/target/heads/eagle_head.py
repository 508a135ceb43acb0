"""The EAGLE-3 draft head: one decoder layer over the token embedding and the target's fused states.

fc fuses the outputs of a low, a middle and a high decoder layer of the target (3H -> H). The layer's attention reads
both halves, each under a norm of its own: q, k, v = W [norm(embedding); norm(hidden)]; its residual stream is the
fused state. A final norm and a projection of the head's own give logits over a draft vocabulary, which may be smaller
than the target's. Module names are those of the published checkpoints (files: `eagle_files.py`).

Shape suffixes: B rows of a batch, T pairs, K pairs with those in the cache, H width of the head, F = 3 x target width,
N attention heads, G query heads a key head, W head dimension, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from moexp.base.errors import MoexpError
from moexp.target.heads.draft_vocab import DraftVocab
from moexp.target.heads.head import Cache, DraftHead, RMSNorm, SharedParts, init_matrices

FEATURES = 3


@dataclass(frozen=True)
class EagleConfig:
    """Geometry of a head.

    Attributes:
        hidden: H.
        target_hidden: width of the target.
        vocab, draft_vocab: V and D.
        num_heads, num_kv_heads, head_dim: of the attention.
        ffn: inner width of the feed-forward block.
        feature_layers: the target's decoder layers whose outputs are fused, low to high.
        rope: rotary parameters as transformers 5 has them: rope_type, rope_theta and what the type asks for.
        attention_bias: biases in q, k, v and o.
        own_embedding: the head carries a token embedding; otherwise it uses the target's.
    """

    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    feature_layers: tuple[int, ...]
    norm_eps: float = 1e-6
    max_positions: int = 2048
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    own_embedding: bool = False

    @classmethod
    def for_target(cls, config: Any, draft_vocab: int, *, ffn: int | None = None) -> EagleConfig:
        """A head of the target's own geometry, from its transformers config."""
        latent = hasattr(config, "kv_lora_rank")
        head_dim = None if latent else getattr(config, "head_dim", None)
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            hidden=config.hidden_size,
            target_hidden=config.hidden_size,
            vocab=config.vocab_size,
            draft_vocab=draft_vocab,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            ffn=ffn or config.intermediate_size,
            feature_layers=default_feature_layers(config.num_hidden_layers),
            norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            rope={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        )


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that published heads read: 1, the middle, the fourth from the end; spread out in shallow targets."""
    if num_layers >= 8:
        return (1, num_layers // 2 - 1, num_layers - 4)
    return (0, (num_layers - 1) // 2, num_layers - 1)


class EagleHead(DraftHead):
    """The head over a draft vocabulary of its own.

    Args:
        config: geometry.
        vocab: maps of the draft vocabulary.
        embedding: the target's token embedding, used unless the head has its own.
        device: where the weights are created ("meta" if they will be loaded).
    """

    def __init__(
        self, config: EagleConfig, vocab: DraftVocab, embedding: Callable[[Tensor], Tensor], *, device: str = "cpu"
    ) -> None:
        super().__init__()
        assert len(vocab.d2t) == config.draft_vocab and len(vocab.t2d) == config.vocab
        self.config = config
        self.feature_layers, self.vocab = config.feature_layers, config.vocab
        self.shared = SharedParts(embedding, None, _rotary(config))
        with torch.device(device):
            self.fc = nn.Linear(FEATURES * config.target_hidden, config.hidden, bias=False)
            self.midlayer = _MidLayer(config)
            self.norm = RMSNorm(config.hidden, config.norm_eps)
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden) if config.own_embedding else None
        self.register_buffer("d2t", vocab.d2t.clone())
        self.register_buffer("t2d", vocab.t2d.clone())
        self._target_ids_D, self._draft_ids_V = vocab.target_ids, vocab.draft_ids

    def features(self, features_BTF: Tensor) -> Tensor:
        """The fused states [B, T, H] of features [B, T, 3 x target width]."""
        return self.fc(features_BTF.to(self.fc.weight.dtype))

    def embed(self, ids: Tensor) -> Tensor:
        """By the head's own table, where it has one."""
        return self.shared.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)

    def step(
        self, embedded_BTH: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, mask_B1TK: Tensor, cache: Cache | None
    ) -> Tensor:
        """Gives hidden states before the final norm."""
        return self.midlayer(embedded_BTH, hidden_BTH, self.shared.rotary, positions_BT, mask_B1TK, cache)

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        """fp32 logits [B, T, D]."""
        return self.lm_head(self.norm(hidden_BTH)).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """d + d2t[d]."""
        return self._target_ids_D.to(draft_ids.device)[draft_ids]

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """The inverse; -1 for tokens outside the draft vocabulary."""
        return self._draft_ids_V.to(target_ids.device)[target_ids]

    def trainable(self) -> dict[str, nn.Parameter]:
        """Everything but an embedding, by name."""
        return {name: value for name, value in self.named_parameters() if not name.startswith("embed_tokens")}


def new_eagle_head(
    config: EagleConfig, vocab: DraftVocab, embedding: Callable[[Tensor], Tensor], *, seed: int = 0
) -> EagleHead:
    """A head with random weights (fp32)."""
    head = EagleHead(config, vocab, embedding)
    init_matrices(head, torch.Generator().manual_seed(seed))
    return head


@torch.no_grad()
def start_from_target(head: EagleHead, norm: nn.Module, lm_head: nn.Module) -> None:
    """Starts a head near the target: its rows of the output projection and its last norm, the high layer's state
    through fc, and a decoder layer that adds nothing yet. Needs a head as wide as the target.
    """
    config = head.config
    if config.hidden != config.target_hidden:
        raise MoexpError(
            f"a head of width {config.hidden} cannot start from a target of width {config.target_hidden}",
            valid=f"width {config.target_hidden}",
        )
    rows: Any = lm_head.weight
    last: Any = norm.weight
    head.lm_head.weight.copy_(rows[head.target_ids(torch.arange(config.draft_vocab))])
    head.norm.weight.copy_(last)
    head.fc.weight.zero_()
    head.fc.weight[:, -config.hidden :].copy_(torch.eye(config.hidden))
    head.midlayer.self_attn.o_proj.weight.zero_()
    head.midlayer.mlp.down_proj.weight.zero_()


class _MidLayer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)

    def forward(
        self,
        embedded_BTH: Tensor,
        hidden_BTH: Tensor,
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        positions_BT: Tensor,
        mask_B1TK: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        both_BT2H = torch.cat([self.input_layernorm(embedded_BTH), self.hidden_norm(hidden_BTH)], dim=-1)
        hidden_BTH = hidden_BTH + self.self_attn(both_BT2H, rotary, positions_BT, mask_B1TK, cache)
        return hidden_BTH + self.mlp(self.post_attention_layernorm(hidden_BTH))


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.width = config.head_dim
        wide, bias = 2 * config.hidden, config.attention_bias
        self.q_proj = nn.Linear(wide, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(wide, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(wide, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden, bias=bias)

    def forward(
        self,
        both_BT2H: Tensor,
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        positions_BT: Tensor,
        mask_B1TK: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        batch, rows = both_BT2H.shape[:2]
        query, key, value = (
            project(both_BT2H).view(batch, rows, -1, self.width).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos_BTW, sin_BTW = rotary(query, positions_BT)
        query, key = _rotate(query, cos_BTW, sin_BTW), _rotate(key, cos_BTW, sin_BTW)
        if cache is not None:
            key, value = cache.update(key, value)
        # Query heads that share a key head are further rows of one attention: keys need not be repeated.
        groups = query.shape[1] // key.shape[1]
        query = query.unflatten(1, (-1, groups)).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_B1TK.repeat(1, 1, groups, 1))
        mixed = mixed.unflatten(2, (groups, rows)).flatten(1, 2)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))


class _FeedForward(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTH)) * self.up_proj(x_BTH))


def _rotate(x_BNTW: Tensor, cos_BTW: Tensor, sin_BTW: Tensor) -> Tensor:
    """Rotary positions, first half of the dimensions against the second."""
    one, two = x_BNTW.chunk(2, dim=-1)
    return x_BNTW * cos_BTW[:, None] + torch.cat([-two, one], dim=-1) * sin_BTW[:, None]


def _rotary(config: EagleConfig) -> LlamaRotaryEmbedding:
    """Frequencies by transformers, which knows all kinds of scaling. It asks for no more than these fields."""
    try:
        shape = LlamaConfig(
            hidden_size=config.num_heads * config.head_dim,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope),
        )
        return LlamaRotaryEmbedding(shape)
    except (KeyError, ValueError, TypeError) as error:
        raise MoexpError(
            f"rotary positions of the draft head: {str(error).splitlines()[0]}", valid="a rope_type of transformers"
        ) from error
