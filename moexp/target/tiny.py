"""A random tiny target, built in milliseconds: a real checkpoint folder in a family's own format, for tests.

Its weights are scaled so that greedy decoding wanders instead of repeating one token, and so that a draft path with
fewer routed experts agrees with the full model on some tokens and not on others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from moexp.base.errors import MoexpError

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
LOGIT_GAIN = 4.0  # standard deviation of the logits: the larger, the surer is the draft of its tokens
NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
GLM: dict[str, Any] = {"head_dim": 16, "use_qk_norm": False, "partial_rotary_factor": 1.0}
LATENT: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
GREEDY: dict[str, Any] = {"topk_method": "greedy", "routed_scaling_factor": 4.0}
WINDOW: dict[str, Any] = {"sliding_window": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@dataclass(frozen=True)
class TinyTarget:
    """What to build; the same values give the same bytes.

    Attributes:
        seed: of the weights.
        hidden, layers, experts, top_k, shared, expert_width, vocab: geometry. Some families have no shared expert.
        model_type: any family that moexp runs.
        first_dense: leading layers without experts (in the families that have such).
        dtype: storage type.
        expert_gain: scale of the routed experts: the larger, the less a draft path without them agrees.
        max_shard_size: as in `save_pretrained`, to get several shards.
        changes: config values in place of the family's own here.
    """

    seed: int = 0
    hidden: int = 64
    layers: int = 4
    experts: int = 16
    top_k: int = 4
    shared: int = 1
    expert_width: int = 32
    vocab: int = 256
    model_type: str = "glm4_moe"
    first_dense: int = 1
    dtype: torch.dtype = torch.float32
    expert_gain: float = 0.8
    max_shard_size: str = "50GB"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def geometry(self) -> dict[str, Any]:
        """Config values of the family.

        Raises:
            MoexpError: a family that has no tiny target.
        """
        heads = max(2, self.hidden // 16)
        common: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "num_experts_per_tok": self.top_k,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        }
        deepseek: dict[str, Any] = {
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "first_k_dense_replace": self.first_dense,
        }
        local: dict[str, Any] = {
            "num_local_experts": self.experts,
            "intermediate_size": self.expert_width,
            "head_dim": 16,
        }
        per_family: dict[str, dict[str, Any]] = {
            "glm4_moe": deepseek | GROUPS | GLM,
            "deepseek_v3": deepseek | GROUPS | LATENT | {"num_key_value_heads": heads},
            "deepseek_v2": deepseek | LATENT | GREEDY | {"num_key_value_heads": heads},
            "olmoe": {"num_experts": self.experts, "intermediate_size": self.expert_width, "clip_qkv": 4.0},
            "mixtral": local,
            "gpt_oss": local | WINDOW,
            "qwen3_moe": {"num_experts": self.experts, "head_dim": 16, "norm_topk_prob": True},
        }
        if self.model_type not in per_family:
            raise MoexpError(f"no tiny target of type {self.model_type!r}", valid=", ".join(sorted(per_family)))
        return common | per_family[self.model_type]


def build_tiny_target(folder: Path | str, tiny: TinyTarget) -> Path:
    """Write a random checkpoint with a byte-level tokenizer and a chat template; gives the folder.

    Raises:
        MoexpError: the vocabulary has no room for all bytes that occur in UTF-8 and the special tokens.
    """
    folder = Path(folder)
    tokenizer = byte_tokenizer(tiny.vocab)
    config = AutoConfig.for_model(
        tiny.model_type,
        **(tiny.geometry() | dict(tiny.changes)),
        vocab_size=tiny.vocab,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype=tiny.dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model, tiny.expert_gain)
    for name, parameter in model.named_parameters():
        if not name.endswith("gate.weight"):  # routers stay in fp32, as transformers keeps them
            parameter.data = parameter.data.to(tiny.dtype)
    model.save_pretrained(folder, max_shard_size=tiny.max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(vocab: int = 256) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes; special tokens take ids of bytes that never occur in UTF-8, then ids from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    never = {_byte_char(byte) for byte in NEVER_IN_UTF8}
    bytes_used = [char for char in alphabet if char not in never]
    if vocab < len(bytes_used) + len(SPECIAL_TOKENS):
        raise MoexpError(
            f"a vocabulary of {vocab} is too small for a byte-level tokenizer",
            valid=f"from {len(bytes_used) + len(SPECIAL_TOKENS)}",
        )
    ids = {char: number for number, char in enumerate(bytes_used + list(SPECIAL_TOKENS))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[3],
        additional_special_tokens=list(SPECIAL_TOKENS[2:3]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_char(byte: int) -> str:
    """The character that ByteLevel writes for a byte (GPT-2's table: printable bytes stand for themselves)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sorted(set(range(256)) - set(printable)).index(byte))


def _randomise(model: nn.Module, expert_gain: float) -> None:
    """Redraw all weights: matrices keep the scale of what passes through, routed experts are scaled by the gain."""
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        elif "embed_tokens" in name:
            nn.init.normal_(parameter, std=1.0)
        elif name.endswith("_proj_bias"):
            nn.init.normal_(parameter, std=0.1)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            nn.init.normal_(parameter, std=math.sqrt(expert_gain / parameter.shape[-1]))
        elif name == "lm_head.weight":
            nn.init.normal_(parameter, std=LOGIT_GAIN / math.sqrt(parameter.shape[-1]))
        elif name.endswith(("gate.weight", "router.weight")):
            nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter.shape[-1]))
        else:
            nn.init.normal_(parameter, std=1.0 / math.sqrt(parameter.shape[-1]))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.05)
