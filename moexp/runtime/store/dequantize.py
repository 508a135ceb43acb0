"""llama.cpp's Q8_0 and Q4_0 blocks to weights, with exactly the values of the `gguf` package's `dequantize`.

It is done whenever an expert arrives, in the store's threads; the package's own numpy code took two to three times as
long. A block is 32 weights: a fp16 scale, then 32 int8, or 16 bytes whose low
halves are the first sixteen weights and whose high halves are the others, 8 too large.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 32
_CHUNK = 1000  # blocks: as many as torch runs in the calling thread, and as fit the processor's cache
_LOW_HALVES = 0x0F0F0F0F0F0F0F0F


def dequantize_into(raw: Tensor, quant: str, out: Tensor) -> None:
    """Fill `out` with the weights in `raw`.

    Args:
        raw: uint8, whole blocks.
        quant: "q8_0" or "q4_0".
        out: contiguous, as many weights as the blocks hold; values are rounded once, from fp32 to its type.
    """
    unpack, block_bytes = _UNPACK[quant]
    blocks_NB, out_NW = raw.view(-1, block_bytes), out.view(-1, BLOCK)
    values = torch.empty(min(_CHUNK, len(blocks_NB)), BLOCK, dtype=torch.float32)
    for begin in range(0, len(blocks_NB), _CHUNK):
        chunk = blocks_NB[begin : begin + _CHUNK]
        into = values[: len(chunk)]
        unpack(chunk[:, 2:], into)
        into.mul_(chunk[:, :2].contiguous().view(torch.float16).float())
        out_NW[begin : begin + _CHUNK].copy_(into)


def _unpack_bytes(packed_N32: Tensor, into: Tensor) -> None:
    into.copy_(packed_N32.view(torch.int8))


def _unpack_halves(packed_N16: Tensor, into: Tensor) -> None:
    # Eight bytes at a time: rows of sixteen are too short for the loops over single bytes.
    words_N2 = packed_N16.contiguous().view(torch.int64)
    both_N4 = torch.cat([words_N2 & _LOW_HALVES, (words_N2 >> 4) & _LOW_HALVES], dim=1)
    into.copy_(both_N4.view(torch.uint8)).sub_(8)


_UNPACK: dict[str, tuple[Callable[[Tensor, Tensor], None], int]] = {
    "q8_0": (_unpack_bytes, 34),
    "q4_0": (_unpack_halves, 18),
}
