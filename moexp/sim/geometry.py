"""The shape of a mixture-of-experts model as far as cost depends on it: the weights of each part, and their bytes.

Norms, biases of attention and rotary tables are left out: below a thousandth of the weights that a step reads. No torch
here: geometries of models that no machine at hand can hold are pure arithmetic on their published configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from moexp.base.errors import MoexpError
from moexp.sim.traffic import TrafficModel

if TYPE_CHECKING:
    from moexp.target.spec import MoESpec


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


@dataclass(frozen=True)
class Geometry:
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
        attention_params: weights of one layer's attention.
        dense_width: inner width of the FFN of a layer without experts (0: there is no such layer).
        vocab: rows of the head, and of the embedding.
        expert_bias_params: biases of one routed expert, kept in bf16 or wider.
        kv_width: values that one layer caches of a token here: latent attention's keys and values are cached expanded,
            both as wide as the keys (0: not known).
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
    attention_params: int
    dense_width: int
    vocab: int
    source: str
    expert_bias_params: int = 0
    precision: str = "bf16"
    resident_precision: str = "bf16"
    kv_width: int = 0
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
        return round(tokens * self.layers * self.kv_width * bytes_per_value)

    def traffic(self, precision: str | None = None, resident: str | None = None) -> TrafficModel:
        """What a step reads from the number of experts that it touches (EcoSpec, Table 2)."""
        return TrafficModel(self.moe_layers, self.expert_bytes(precision), self.resident_bytes(resident))

    @classmethod
    def from_spec(
        cls,
        spec: MoESpec,
        *,
        name: str | None = None,
        attention_params: int | None = None,
        dense_width: int | None = None,
        kv_width: int | None = None,
        precision: str = "bf16",
    ) -> Geometry:
        """The geometry of a built target.

        Args:
            spec: what its config says.
            name: by default the model type.
            attention_params: of one layer. By default those of grouped-query attention whose heads together are as
                wide as the residual stream, which holds for carved targets.
            dense_width: of a layer without experts. By default what a token uses in a MoE layer.
            kv_width: of one layer; by default that of the attention above.
            precision: of all weights.
        """
        head_width = spec.hidden_size // spec.num_heads
        if attention_params is None:
            attention_params = grouped_attention(spec.hidden_size, spec.num_heads, spec.num_kv_heads, head_width)
        if dense_width is None:
            dense_width = (spec.num_shared + spec.top_k) * spec.expert_width
        return cls(
            name=name or spec.model_type,
            layers=spec.num_layers,
            moe_layers=len(spec.moe_layers),
            hidden=spec.hidden_size,
            experts=spec.num_experts,
            top_k=spec.top_k,
            shared_experts=spec.num_shared,
            expert_width=spec.expert_width,
            attention_params=attention_params,
            dense_width=dense_width,
            vocab=spec.vocab_size,
            precision=precision,
            resident_precision=precision,
            kv_width=2 * spec.num_kv_heads * head_width if kv_width is None else kv_width,
            source=f"config of a built {spec.model_type} target",
        )


def grouped_attention(hidden: int, heads: int, kv_heads: int, head_width: int) -> int:
    """Weights of grouped-query attention: query and output, key and value."""
    return 2 * hidden * heads * head_width + 2 * hidden * kv_heads * head_width


def latent_attention(
    hidden: int, heads: int, *, q_rank: int | None, kv_rank: int, plain: int, rotary: int, value: int
) -> int:
    """Weights of DeepSeek's latent attention.

    Args:
        q_rank, kv_rank: `q_lora_rank` (None: queries are not compressed) and `kv_lora_rank`.
        plain, rotary, value: widths a head: `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`.
    """
    query_out = heads * (plain + rotary)
    query = hidden * query_out if q_rank is None else hidden * q_rank + q_rank * query_out
    key_value = hidden * (kv_rank + rotary) + kv_rank * heads * (plain + value)
    return query + key_value + heads * value * hidden


def _published(name: str, *hub_ids: str, **shape: Any) -> Geometry:
    """A model whose shape the config of its first repository gives."""
    return Geometry(name=name, hub_ids=hub_ids, source=f"config.json of {hub_ids[0]} on huggingface.co", **shape)


_SMALL_LATENT = latent_attention(2048, 16, q_rank=None, kv_rank=512, plain=128, rotary=64, value=128)
_SMALL_KV = 2 * 16 * (128 + 64)

GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        _published(
            "DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat",
            "deepseek-ai/DeepSeek-Coder-V2-Lite-Base", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
            layers=27, moe_layers=26, hidden=2048, experts=64, top_k=6, shared_experts=2, expert_width=1408,
            attention_params=_SMALL_LATENT, dense_width=10_944, vocab=102_400, kv_width=_SMALL_KV,
        ),
        _published(
            "Moonlight-16B-A3B", "moonshotai/Moonlight-16B-A3B", "moonshotai/Moonlight-16B-A3B-Instruct",
            layers=27, moe_layers=26, hidden=2048, experts=64, top_k=6, shared_experts=2, expert_width=1408,
            attention_params=_SMALL_LATENT, dense_width=11_264, vocab=163_840, kv_width=_SMALL_KV,
        ),
        _published(
            "Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-Instruct-2507",
            "Qwen/Qwen3-235B-A22B-Thinking-2507",
            layers=94, moe_layers=94, hidden=4096, experts=128, top_k=8, shared_experts=0, expert_width=1536,
            attention_params=grouped_attention(4096, 64, 4, 128), dense_width=0, vocab=151_936, kv_width=2 * 4 * 128,
        ),
        _published(
            "GPT-OSS-120B", "openai/gpt-oss-120b",
            layers=36, moe_layers=36, hidden=2880, experts=128, top_k=4, shared_experts=0, expert_width=2880,
            attention_params=grouped_attention(2880, 64, 8, 64), dense_width=0, vocab=201_088, kv_width=2 * 8 * 64,
            expert_bias_params=3 * 2880, precision="mxfp4",
        ),
        _published(
            "DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base",
            "deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base",
            "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528",
            layers=61, moe_layers=58, hidden=7168, experts=256, top_k=8, shared_experts=1, expert_width=2048,
            attention_params=latent_attention(7168, 128, q_rank=1536, kv_rank=512, plain=128, rotary=64, value=128),
            dense_width=18_432, vocab=129_280, kv_width=2 * 128 * (128 + 64), mtp_layers=1,
            precision="fp8", resident_precision="fp8",
        ),
        _published(
            "OLMoE-1B-7B", "allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0924-SFT",
            "allenai/OLMoE-1B-7B-0924-Instruct", "allenai/OLMoE-1B-7B-0125", "allenai/OLMoE-1B-7B-0125-Instruct",
            layers=16, moe_layers=16, hidden=2048, experts=64, top_k=8, shared_experts=0, expert_width=1024,
            attention_params=grouped_attention(2048, 16, 16, 128), dense_width=0, vocab=50_304, kv_width=2 * 16 * 128,
        ),
        _published(
            "Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B-Instruct-2507",
            "Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct",
            layers=48, moe_layers=48, hidden=2048, experts=128, top_k=8, shared_experts=0, expert_width=768,
            attention_params=grouped_attention(2048, 32, 4, 128), dense_width=0, vocab=151_936, kv_width=2 * 4 * 128,
        ),
        _published(
            "GPT-OSS-20B", "openai/gpt-oss-20b",
            layers=24, moe_layers=24, hidden=2880, experts=32, top_k=4, shared_experts=0, expert_width=2880,
            attention_params=grouped_attention(2880, 64, 8, 64), dense_width=0, vocab=201_088, kv_width=2 * 8 * 64,
            expert_bias_params=3 * 2880, precision="mxfp4",
        ),
        _published(
            "Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1",
            layers=32, moe_layers=32, hidden=4096, experts=8, top_k=2, shared_experts=0, expert_width=14_336,
            attention_params=grouped_attention(4096, 32, 8, 128), dense_width=0, vocab=32_000, kv_width=2 * 8 * 128,
        ),
    )
}  # fmt: skip


def find_geometry(name: str) -> Geometry:
    """The published model of that name; MoexpError naming those there are."""
    if name not in GEOMETRIES:
        raise MoexpError(f"no geometry of {name!r}", valid=", ".join(GEOMETRIES))
    return GEOMETRIES[name]
