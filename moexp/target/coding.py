"""Experts that a checkpoint does not keep as three plain matrices: how their tensors become the matrices that are used.

An expert is always read in the bytes that were published and decoded on arrival, wherever it is served from, so that
AR decoding and every speculative method share the very same weights.

Everything here runs in the threads that move experts: work is cut into pieces that torch computes in one thread, or
each of those threads would start a team of its own.

Shape suffixes: I expert width, H hidden size, R rows and C columns of a stored matrix, G groups of 32 columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.target.families import FAMILIES

if TYPE_CHECKING:
    from moexp.target.experts import ExpertWeights

PIECE = 1 << 15
"""Elements up to which torch does not go parallel."""

SCALE = "_scale_inv"
"""What FP8 checkpoints append to a weight's name for its scales."""

MX_GROUP = 32
"""Columns that share a scale in MXFP4; they lie in 16 bytes."""


@dataclass(frozen=True)
class Coding:
    """How experts are stored.

    Attributes:
        name: "fp8", "mxfp4" or "interleaved".
        tensors: checkpoint name of each tensor of an expert, with `{layer}`, and `{expert}` where each has its own.
        stored: for each, the safetensors types it may have.
        shapes: (each tensor's stored shape) -> (I, H), or None where they do not fit together.
        decode: (the stored tensors, where the expert goes): fills in all of it.
        biased: the experts have biases.
    """

    name: str
    tensors: Mapping[str, str]
    stored: Mapping[str, tuple[str, ...]]
    shapes: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, int] | None]
    decode: Callable[[Mapping[str, Tensor], ExpertWeights], None]
    biased: bool = False


# --- which one ---


def stored_as(folder: Path) -> tuple[Mapping[str, str], Coding | None]:
    """Names of an expert's tensors in the folder's checkpoint, and their coding, by its config."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        model_type, quantised = config.get("model_type"), config.get("quantization_config") or {}
        method = quantised.get("quant_method")
    except (OSError, ValueError, AttributeError) as error:
        raise MoexpError("no readable config.json", where=str(folder)) from error
    if model_type not in FAMILIES:
        raise MoexpError(f"model_type {model_type!r} is not supported", where=str(path), valid=", ".join(FAMILIES))
    family = FAMILIES[model_type]
    if not quantised:
        return family.tensors, interleaved_coding(family.tensors) if family.layout == "interleaved" else None
    if method == "fp8" and family.layout == "gated":
        return family.tensors, fp8_coding(family.tensors, fp8_block(quantised))
    if method == "mxfp4" and family.layout == "interleaved":
        return family.tensors, mxfp4_coding(family.tensors)
    raise unsupported_quantisation(f"{method} ({model_type})", path)


def fp8_block(quantisation: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, of a `quantization_config` whose method is fp8."""
    rows, columns = quantisation.get("weight_block_size") or (128, 128)
    return rows, columns


def unsupported_quantisation(what: str, where: Path) -> MoexpError:
    return MoexpError(
        f"this checkpoint is quantised as {what}",
        where=str(where),
        valid="bf16, fp16, fp32, fp8 in blocks (weight_scale_inv), or mxfp4 of gpt_oss",
    )


# --- FP8 in blocks, as DeepSeek-V3 publishes it ---


def fp8_coding(names: Mapping[str, str], block: tuple[int, int]) -> Coding:
    """E4M3 matrices, each with an fp32 scale a block.

    Args:
        names: of the gate, up and down matrices.
        block: rows and columns that share a scale.
    """
    rows, columns = block

    def shapes(stored: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        if any(len(shape) != 2 for shape in stored.values()):
            return None
        width, hidden = stored["gate"]
        fits = stored["up"] == (width, hidden) and stored["down"] == (hidden, width)
        for part in names:
            high, wide = stored[part]
            fits = fits and stored[part + SCALE] == (-(-high // rows), -(-wide // columns))
        return (width, hidden) if fits else None

    def decode(stored: Mapping[str, Tensor], into: ExpertWeights) -> None:
        width = into.down.shape[1]
        for part, target in (("gate", into.gate_up[:width]), ("up", into.gate_up[width:]), ("down", into.down)):
            dequantise_fp8(stored[part], stored[part + SCALE], target, block)

    tensors = {part + suffix: name + suffix for part, name in names.items() for suffix in ("", SCALE)}
    types = {part: ("F32",) if part.endswith(SCALE) else ("F8_E4M3",) for part in tensors}
    return Coding("fp8", tensors, types, shapes, decode)


def dequantise_fp8(weight_RC: Tensor, scales: Tensor, into_RC: Tensor, block: tuple[int, int]) -> None:
    """Weight times its block's scale, in fp32, rounded to the type of `into_RC`.

    An E4M3 number, its exponent and mantissa moved into place, is an fp16 number 256 times too small. That takes a
    quarter of the time of torch's own conversion, which works through numbers one by one.

    Raises:
        MoexpError: a weight is not a number.
    """
    rows, columns = weight_RC.shape
    bytes_RC = weight_RC.view(torch.int8)
    step = max(1, PIECE // columns)
    for first in range(0, rows, block[0]):
        scale_C = scales[first // block[0]].repeat_interleave(block[1])[:columns] * 256
        last = min(first + block[0], rows)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            stored = bytes_RC[begin:end]
            if (stored & 127).max() == 127:
                raise MoexpError("an fp8 weight is not a number", valid="a checkpoint of finite weights")
            # Sign-extended: the sign is in bits 7 to 15, and after the shift in 14 and 15.
            half = stored.short().bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
            into_RC[begin:end] = half.float().mul_(scale_C)


# --- GPT-OSS: gate and up in turn, with biases; plain or in MXFP4 ---


def interleaved_coding(names: Mapping[str, str]) -> Coding:
    """[H, 2I] with gate and up columns in turn, [I, H], and a bias for each."""

    def shapes(stored: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        if len(stored["gate_up"]) != 2:
            return None
        hidden, double = stored["gate_up"]
        width = double // 2
        fits = stored["down"] == (width, hidden) and _biases_fit(stored, width, hidden)
        return (width, hidden) if fits else None

    def decode(stored: Mapping[str, Tensor], into: ExpertWeights) -> None:
        hidden, width = into.down.shape
        gate_up_2IH, stored_2IH = into.gate_up.view(2, width, hidden), stored["gate_up"].view(hidden, width, 2)
        stored_2IH = stored_2IH.permute(2, 1, 0)
        down_HI, stored_HI = into.down, stored["down"].t()
        step = max(1, PIECE // (2 * hidden))
        for begin in range(0, width, step):
            gate_up_2IH[:, begin : begin + step] = stored_2IH[:, begin : begin + step]
            down_HI[:, begin : begin + step] = stored_HI[:, begin : begin + step]
        _copy_biases(stored, into)

    floats = ("BF16", "F16", "F32")
    return Coding("interleaved", names, dict.fromkeys(names, floats), shapes, decode, biased=True)


def mxfp4_coding(names: Mapping[str, str]) -> Coding:
    """As GPT-OSS publishes it: rows of outputs (gate and up in turn), 32 inputs in 16 bytes with one scale."""
    tensors: dict[str, str] = {}
    types: dict[str, tuple[str, ...]] = {}
    for part, name in names.items():
        if part.endswith("_bias"):
            tensors[part], types[part] = name, ("BF16", "F16", "F32")
        else:
            for suffix in ("_blocks", "_scales"):
                tensors[part + suffix], types[part + suffix] = name + suffix, ("U8",)

    def shapes(stored: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        if len(stored["gate_up_blocks"]) != 3 or len(stored["down_blocks"]) != 3:
            return None
        (double, groups, _), (hidden, down_groups, _) = stored["gate_up_blocks"], stored["down_blocks"]
        width = double // 2
        fits = hidden == groups * MX_GROUP and width == down_groups * MX_GROUP and _biases_fit(stored, width, hidden)
        for part in ("gate_up", "down"):
            *blocks, size = stored[part + "_blocks"]
            fits = fits and size == MX_GROUP // 2 and stored[part + "_scales"] == tuple(blocks)
        return (width, hidden) if fits else None

    def decode(stored: Mapping[str, Tensor], into: ExpertWeights) -> None:
        hidden, width = into.down.shape
        gate_up_I2H = into.gate_up.view(2, width, hidden).transpose(0, 1)
        dequantise_mxfp4(
            stored["gate_up_blocks"].view(width, -1, MX_GROUP // 2),
            stored["gate_up_scales"].view(width, -1),
            gate_up_I2H,
        )
        dequantise_mxfp4(stored["down_blocks"], stored["down_scales"], into.down)
        _copy_biases(stored, into)

    return Coding("mxfp4", tensors, types, shapes, decode, biased=True)


def dequantise_mxfp4(blocks_RGB: Tensor, scales_RG: Tensor, into: Tensor) -> None:
    """E2M1 values (the low half of a byte first) times 2^(scale - 127): exact in bf16, fp32 being wider still.

    Args:
        blocks_RGB: uint8 [R, G, 16].
        scales_RG: uint8 [R, G].
        into: [R, ...] of 32 G elements a row.
    """
    rows, groups, _ = blocks_RGB.shape
    step = max(1, PIECE // (groups * MX_GROUP))
    for begin in range(0, rows, step):
        span = slice(begin, begin + step)
        byte = blocks_RGB[span].int()
        # As fp16, 2^14 times too small: a byte's lower three bits and sign go to 9-11, 15, the upper to 25-27, 31.
        pairs = (byte * (1 << 9 | 1 << 21)).bitwise_and_(0x0E000E00)
        pairs.bitwise_or_(byte.mul_(1 << 12 | 1 << 24).bitwise_and_(-0x7FFF8000))
        values = pairs.view(torch.float16).mul_(1 << 14).float()
        values.mul_(_POWERS.take(scales_RG[span].long())[..., None])
        into[span] = values.view(into[span].shape)


_POWERS = torch.tensor([2.0 ** (scale - 127) for scale in range(255)] + [float("nan")])
"""What a scale's byte stands for; the highest is no number."""


def _biases_fit(stored: Mapping[str, tuple[int, ...]], width: int, hidden: int) -> bool:
    return stored["gate_up_bias"] == (2 * width,) and stored["down_bias"] == (hidden,)


def _copy_biases(stored: Mapping[str, Tensor], into: ExpertWeights) -> None:
    assert into.gate_up_bias is not None and into.down_bias is not None
    into.gate_up_bias.view(2, -1).copy_(stored["gate_up_bias"].view(-1, 2).t())
    into.down_bias.copy_(stored["down_bias"])
