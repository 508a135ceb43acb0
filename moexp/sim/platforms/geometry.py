"""The weights of a mixture-of-experts model by part, and their bytes: what costs and memory depend on.

Norms, biases of attention and rotary tables are left out: below a thousandth of the weights that a step reads. No torch
here: models that no machine at hand can hold are arithmetic on their published configs (`published_models.yaml`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any, NamedTuple

from moexp.base.errors import MoexpError
from moexp.base.yamlio import read_yaml


class Precision(NamedTuple):
    """A storage format: bytes a weight, its block's scales included, and where that figure comes from."""

    bytes_per_weight: float
    source: str


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(4.0, "32 bits"),
    "bf16": Precision(2.0, "16 bits"),
    "fp8": Precision(1 + 4 / 128**2, "8 bits, one fp32 scale a block of 128 x 128 weights (DeepSeek-V3's checkpoints)"),
    "q4_0": Precision((2 + 32 / 2) / 32, "llama.cpp: blocks of 32 weights at 4 bits and one fp16 scale"),
    "mxfp4": Precision((1 + 32 / 2) / 32, "OCP MX: blocks of 32 weights at 4 bits and one 8-bit scale"),
}
UNQUANTISED = "bf16"  # what routers, heads and embeddings are kept in, whatever the rest is


def bytes_per_weight(precision: str) -> float:
    """Bytes of one weight, scales included; MoexpError naming the formats there are."""
    if precision not in PRECISIONS:
        raise MoexpError(f"unknown precision {precision!r}", valid=", ".join(PRECISIONS))
    return PRECISIONS[precision].bytes_per_weight


class Attention(NamedTuple):
    """One layer's attention: its weights, and the values that it caches of a token."""

    params: int
    kv_width: int


def grouped_attention(hidden: int, *, heads: int, kv_heads: int, width: int) -> Attention:
    """Grouped-query attention with heads of `width`: query and output, key and value."""
    kv_width = 2 * kv_heads * width
    return Attention(2 * hidden * heads * width + hidden * kv_width, kv_width)


def latent_attention(
    hidden: int, *, heads: int, q_rank: int | None, kv_rank: int, plain: int, rotary: int, value: int
) -> Attention:
    """DeepSeek's latent attention. Its keys and values are cached expanded here, both as wide as the keys.

    Args:
        q_rank, kv_rank: `q_lora_rank` (None: queries are not compressed) and `kv_lora_rank`.
        plain, rotary, value: widths a head: `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`.
    """
    query_out = heads * (plain + rotary)
    query = hidden * query_out if q_rank is None else hidden * q_rank + q_rank * query_out
    key_value = hidden * (kv_rank + rotary) + kv_rank * heads * (plain + value)
    return Attention(query + key_value + heads * value * hidden, 2 * query_out)


@dataclass(frozen=True)
class ModelGeometry:
    """Weights of a model by part. A "layer" is a decoder layer; a gated FFN of width W has 3 x hidden x W weights.

    Attributes:
        name: of the model.
        layers: decoder layers, dense ones included.
        moe_layers: of these, layers with routed experts.
        hidden: width of the residual stream.
        experts: routed experts a MoE layer.
        top_k: routed experts a token, in each MoE layer.
        shared_experts: experts of `expert_width` that every token uses, a MoE layer.
        expert_width: inner width of an expert.
        attention: one layer's attention.
        dense_width: inner width of the FFN of a layer without experts (0: there is no such layer).
        vocab: rows of the head, and of the embedding.
        expert_bias_params: biases of one routed expert, kept in bf16 or wider.
        mtp_layers: MoE layers for multi-token prediction that the checkpoint holds besides; decoding reads none.
        hub_ids: repositories with these weights' shapes.
        precision: format that the published checkpoint keeps routed experts in.
        resident_precision: its format of attention, shared experts and dense FFNs.
        source: where these values come from.
    """

    name: str
    layers: int
    moe_layers: int
    hidden: int
    experts: int
    top_k: int
    shared_experts: int
    expert_width: int
    attention: Attention
    dense_width: int
    vocab: int
    source: str
    expert_bias_params: int = 0
    precision: str = "bf16"
    resident_precision: str = "bf16"
    mtp_layers: int = 0
    hub_ids: tuple[str, ...] = ()

    @property
    def dense_layers(self) -> int:
        """Layers without routed experts."""
        return self.layers - self.moe_layers

    @property
    def experts_per_token(self) -> int:
        """Layer-experts that one token routes to."""
        return self.moe_layers * self.top_k

    @property
    def layer_experts(self) -> int:
        """All routed experts of the model."""
        return self.moe_layers * self.experts

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention."""
        return self.attention.params

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert, biases aside."""
        return 3 * self.hidden * self.expert_width

    @property
    def shared_params(self) -> int:
        """Weights of the shared experts of one MoE layer."""
        return self.shared_experts * self.expert_params

    @property
    def router_params(self) -> int:
        """Weights of one MoE layer's router."""
        return self.hidden * self.experts

    @property
    def dense_params(self) -> int:
        """Weights of the FFN of one dense layer."""
        return 3 * self.hidden * self.dense_width

    @property
    def head_params(self) -> int:
        """Weights of the head (and of the embedding, which a step reads but a row of)."""
        return self.vocab * self.hidden

    @property
    def body_params(self) -> int:
        """Weights of attention, shared experts and dense FFNs of the whole model."""
        moe = self.moe_layers * self.shared_params
        return self.layers * self.attention_params + moe + self.dense_layers * self.dense_params

    @property
    def resident_params(self) -> int:
        """Weights that every step reads: all but the routed experts and the embedding."""
        return self.body_params + self.moe_layers * self.router_params + self.head_params

    @property
    def active_params(self) -> int:
        """Weights that a step of one token reads."""
        return self.resident_params + self.experts_per_token * self.expert_params

    @property
    def routed_params(self) -> int:
        """Weights of all routed experts."""
        return self.layer_experts * self.expert_params

    @property
    def loaded_params(self) -> int:
        """Weights of a loaded target: all but the routed experts, the embedding with them."""
        return self.resident_params + self.head_params

    @property
    def mtp_params(self) -> int:
        """Weights of the layers for multi-token prediction, each with its own embedding, head and projection."""
        layer = self.attention_params + self.shared_params + self.router_params + self.experts * self.expert_params
        return self.mtp_layers * (layer + 2 * self.hidden**2 + 2 * self.head_params)

    @property
    def checkpoint_params(self) -> int:
        """Weights of the published checkpoint."""
        return self.routed_params + self.loaded_params + self.mtp_params

    def expert_bytes(self, precision: str | None = None) -> int:
        """Bytes of one routed expert at a precision, by default the checkpoint's own."""
        each = bytes_per_weight(precision or self.precision)
        biases = self.expert_bias_params * max(each, bytes_per_weight(UNQUANTISED))
        return round(self.expert_params * each + biases)

    def pool_bytes(self, precision: str | None = None) -> int:
        """Bytes of all routed experts."""
        return self.layer_experts * self.expert_bytes(precision)

    def resident_bytes(self, precision: str | None = None) -> int:
        """Bytes of `resident_params`; routers and head count as bf16 unless everything else is wider."""
        body = bytes_per_weight(precision or self.resident_precision)
        others = self.resident_params - self.body_params
        return round(self.body_params * body + others * max(body, bytes_per_weight(UNQUANTISED)))

    def checkpoint_bytes(self) -> int:
        """Bytes of the published checkpoint's weights."""
        wide = bytes_per_weight(UNQUANTISED)
        mtp_wide = self.mtp_layers * (self.router_params + 2 * self.hidden**2 + 2 * self.head_params)
        mtp_experts = self.mtp_layers * self.experts
        mtp_body = self.mtp_layers * (self.attention_params + self.shared_params)
        pool = (self.layer_experts + mtp_experts) * self.expert_bytes()
        others = (self.head_params + mtp_wide) * wide + mtp_body * bytes_per_weight(self.resident_precision)
        return round(pool + self.resident_bytes() + others)

    def kv_bytes(self, tokens: int, bytes_per_value: float = 2.0) -> int:
        """Bytes of the keys and values of so many tokens in all layers."""
        return round(tokens * self.layers * self.attention.kv_width * bytes_per_value)


def _published() -> dict[str, ModelGeometry]:
    with as_file(files(__package__) / "published_models.yaml") as path:
        models: dict[str, dict[str, Any]] = read_yaml(path)
    geometries = {}
    for name, shape in models.items():
        attention = latent_attention if "kv_rank" in shape["attention"] else grouped_attention
        shape["attention"] = attention(shape["hidden"], **shape["attention"])
        ids = shape["hub_ids"] = tuple(shape["hub_ids"])
        geometries[name] = ModelGeometry(name=name, source=f"config.json of {ids[0]} on huggingface.co", **shape)
    return geometries


PUBLISHED_MODELS = _published()
"""By name; the config of its first repository gives a model's shape."""


def find_geometry(name: str) -> ModelGeometry:
    """The published model of that name; MoexpError naming those there are."""
    if name not in PUBLISHED_MODELS:
        raise MoexpError(f"no geometry of {name!r}", valid=", ".join(PUBLISHED_MODELS))
    return PUBLISHED_MODELS[name]
