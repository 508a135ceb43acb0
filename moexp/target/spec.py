"""MoESpec: the geometry of a mixture-of-experts checkpoint, read once from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moexp.target.families import family_of


@dataclass(frozen=True)
class MoESpec:
    """What every part of moexp needs to know about a target, whatever its family calls it.

    Attributes:
        model_type: Hugging Face model type, a key of `families.FAMILIES`.
        hidden_size: H, width of the residual stream.
        num_layers: decoder layers, dense ones included.
        moe_layers: decoder layer numbers that hold routed experts, ascending.
        num_experts: routed experts a MoE layer.
        top_k: routed experts a token.
        num_shared: shared experts a MoE layer (0: none).
        expert_width: I, inner width of one routed expert.
        vocab_size: V.
        max_positions: longest sequence of the checkpoint.
        num_heads, num_kv_heads: attention heads, and how many key/value heads they share.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    num_shared: int
    expert_width: int
    vocab_size: int
    max_positions: int
    num_heads: int
    num_kv_heads: int

    @property
    def experts_per_token(self) -> int:
        """Layer-experts that one token routes to: MoE layers x top-k."""
        return len(self.moe_layers) * self.top_k

    @property
    def num_layer_experts(self) -> int:
        """All routed experts of the model: MoE layers x experts."""
        return len(self.moe_layers) * self.num_experts

    @classmethod
    def from_config(cls, config: Any) -> MoESpec:
        """Normalise a transformers config.

        Raises:
            MoexpError: the family is not supported (the message lists those that are).
        """
        family = family_of(config.model_type)
        layers = tuple(layer for layer in range(config.num_hidden_layers) if family.is_moe(config, layer))
        return cls(
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            moe_layers=layers,
            num_experts=getattr(config, family.num_experts),
            top_k=config.num_experts_per_tok,
            num_shared=getattr(config, family.num_shared) if family.num_shared else 0,
            expert_width=getattr(config, family.expert_width),
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
        )
