"""Small checkpoints in every family's hub format, quantised ones included, and dequantised copies as references.

`CASES` says what is supported: each case is tested with experts in each of `STORES`, and docs/families.md lists them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moexp.target.tiny import TinyTarget, build_tiny_target

STORES = ("resident", "host", "disk")
FP8_BLOCK = 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A family in one precision.

    Attributes:
        models: checkpoints on the hub that are so.
        expert: name of one of an expert's tensors, as the hub has it.
        options: of `TinyTarget`.
    """

    family: str
    precision: str
    models: str
    expert: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.family}-{self.precision}"

    @property
    def quantised(self) -> bool:
        return self.precision not in DTYPES


_GATED = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
# Latent queries and expert groups, as in DeepSeek-V3; sizes that end within a block of 128.
_V3 = {
    "hidden": 160,
    "expert_width": 144,
    "changes": {"q_lora_rank": 48, "n_group": 4, "topk_group": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
}
_V3_PLAIN = {"changes": _V3["changes"]}
_QWEN_FP8 = {"hidden": 192, "expert_width": 136}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}


def _plain(family: str, models: str, expert: str, options: Mapping[str, Any] | None = None) -> list[Case]:
    return [Case(family, precision, models, expert, options or {}) for precision in ("bf16", "fp32")]


CASES: tuple[Case, ...] = (
    *_plain("deepseek_v2", "DeepSeek-V2-Lite", _GATED, {"changes": {"rope_parameters": _YARN}}),
    *_plain("deepseek_v3", "Moonlight-16B-A3B", _GATED),
    Case("deepseek_v3", "fp8", "DeepSeek-V3, V3.1, R1", _GATED, _V3),
    *_plain("glm4_moe", "GLM-4.5, GLM-4.5-Air", _GATED),
    *_plain("gpt_oss", "gpt-oss in bf16", "model.layers.{}.mlp.experts.gate_up_proj"),
    Case("gpt_oss", "mxfp4", "gpt-oss-20b, gpt-oss-120b", "model.layers.{}.mlp.experts.gate_up_proj_blocks"),
    *_plain("mixtral", "Mixtral-8x7B, 8x22B", "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"),
    *_plain("olmoe", "OLMoE-1B-7B", _GATED),
    *_plain("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B", _GATED),
    Case("qwen3_moe", "fp8", "Qwen3-30B-A3B-FP8, Qwen3-235B-A22B-FP8", _GATED, _QWEN_FP8),
)


def write_case(folder: Path, case: Case) -> tuple[Path, Path]:
    """(checkpoint in the hub's format, the same in plain numbers for transformers)."""
    dtype = DTYPES.get(case.precision, torch.bfloat16)
    tiny = TinyTarget(model_type=case.family, dtype=dtype, max_shard_size="150KB", **case.options)
    plain = build_tiny_target(folder / "plain", tiny)
    if not case.quantised:
        return plain, plain
    published = Path(shutil.copytree(plain, folder / "published"))
    tensors = read_tensors(plain)
    if case.precision == "fp8":
        stored, meant = to_fp8(tensors)
        quantisation: dict[str, Any] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    else:
        stored, meant = to_mxfp4(tensors)
        quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    write_shards(published, stored)
    write_shards(plain, meant)
    edit_config(published, quantization_config=quantisation)
    return published, plain


def to_fp8(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Linear layers as DeepSeek publishes them, and what the result means in fp32."""
    stored, meant = dict(tensors), {name: tensor.float() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not re.search(r"(proj|proj_with_mqa)\.weight$", name):
            continue
        rows, columns = tensor.shape
        high, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        padded = torch.zeros(high * FP8_BLOCK, wide * FP8_BLOCK)
        padded[:rows, :columns] = tensor.float()
        scales = padded.view(high, FP8_BLOCK, wide, FP8_BLOCK).abs().amax((1, 3)) / 448
        each = scales.kron(torch.ones(FP8_BLOCK, FP8_BLOCK))[:rows, :columns]
        stored[name] = (tensor.float() / each).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        meant[name] = stored[name].float() * each
    return stored, meant


def to_mxfp4(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts as GPT-OSS publishes them, and what transformers says that they mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, meant = dict(tensors), {name: tensor.float() for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(4)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    return stored, meant


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write_shards(folder: Path, tensors: Mapping[str, Tensor], shards: int = 3) -> None:
    """In the place of a checkpoint's weights: `shards` files, cut anywhere, and their index."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    names = sorted(tensors)
    placed: dict[str, str] = {}
    for number in range(shards):
        shard = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file({name: tensors[name].contiguous() for name in mine}, folder / shard, metadata={"format": "pt"})
        placed |= dict.fromkeys(mine, shard)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
