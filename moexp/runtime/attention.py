"""Attention of one decoder layer over the block cache: transformers' own module, or a restructured grouped-query one.

Shape suffixes: T rows of a block, H hidden size, N query heads, M key/value heads, G = N / M, D head dimension, R rotary
dimensions, K padded key/value length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moexp.runtime.kv import BlockCache, BlockCacheLayer
from moexp.runtime.linear import fuse_linears, make_linear


@dataclass
class BlockContext:
    """What all layers of one step share.

    Attributes:
        rows: T, padding included.
        start: position of the first row.
        mask_TK: additive causal mask.
        cache: where keys and values go.
        rotary: cos_T1R and signed sin_T1R (restructured attention), or what the model's own rotary module gave.
        mask_GTK: the mask repeated for each query head of a group, [G * T, K], where the restructured attention packs
            a group's queries into one problem.
        positions: [1, T], for transformers' own modules.
    """

    rows: int
    start: int
    mask_TK: Tensor
    cache: BlockCache
    rotary: Any = None
    mask_GTK: Tensor | None = None
    positions: Tensor | None = None


class ModuleAttention:
    """transformers' own attention module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x_TH: Tensor, block: BlockContext) -> Tensor:
        output, *_ = self.module(
            hidden_states=x_TH[None],
            position_embeddings=block.rotary,
            attention_mask=block.mask_TK[None, None],
            cache=block.cache,
            position_ids=block.positions,
        )
        return output[0]


class GroupedAttention:
    """Grouped-query attention with rotate-half rotary positions, with few kernel calls.

    Query, key and value are one multiplication; rotary positions are applied to queries and keys together, in place; the
    G queries that share a key head are rows of one attention problem, so keys are never repeated.

    Args:
        module: a transformers attention module with q_proj, k_proj, v_proj, o_proj (and perhaps q_norm, k_norm).
        num_heads, num_kv_heads: N and M.
        layer: decoder layer.
        rows, pack: as in `make_linear`.
    """

    def __init__(self, module: Any, *, num_heads: int, num_kv_heads: int, layer: int, rows: int, pack: bool) -> None:
        weight, bias = fuse_linears([module.q_proj, module.k_proj, module.v_proj])
        self.qkv = make_linear(weight, bias, rows=rows, pack=pack)
        self.out = make_linear(module.o_proj.weight, module.o_proj.bias, rows=rows, pack=pack)
        self.layer = layer
        self.heads, self.kv_heads = num_heads, num_kv_heads
        self.group = num_heads // num_kv_heads
        self.head_dim = module.head_dim
        self.scaling = module.scaling
        # Qwen3 always normalises queries and keys a head, GLM-4.5 where its config says so.
        normed = hasattr(module, "q_norm")
        self.norms = (module.q_norm, module.k_norm) if normed else None

    def __call__(self, x_TH: Tensor, block: BlockContext) -> Tensor:
        rows, heads, kv_heads, dim = block.rows, self.heads, self.kv_heads, self.head_dim
        qkv_TND = self.qkv(x_TH).view(rows, heads + 2 * kv_heads, dim)
        if self.norms is not None:
            self._normalise(qkv_TND)
        rotate_half_(qkv_TND[:, : heads + kv_heads], *block.rotary)
        cache = block.cache.layers[self.layer]
        assert isinstance(cache, BlockCacheLayer)
        kv_MTD = qkv_TND[:, heads:].transpose(0, 1)
        keys_1MKD, values_1MKD = cache.update(kv_MTD[None, :kv_heads], kv_MTD[None, kv_heads:])
        q_MGTD = qkv_TND[:, :heads].view(rows, kv_heads, self.group, dim).permute(1, 2, 0, 3)
        if block.mask_GTK is not None:
            q_MGTD = q_MGTD.reshape(1, kv_heads, self.group * rows, dim)
            mask = block.mask_GTK
        else:  # many rows: one problem a query head, over the same keys (expanded, not copied)
            keys_1MKD = keys_1MKD[0, :, None].expand(-1, self.group, -1, -1)
            values_1MKD = values_1MKD[0, :, None].expand(-1, self.group, -1, -1)
            mask = block.mask_TK
        mixed = F.scaled_dot_product_attention(q_MGTD, keys_1MKD, values_1MKD, attn_mask=mask, scale=self.scaling)
        mixed_TND = mixed.reshape(kv_heads, self.group, rows, dim).permute(2, 0, 1, 3)
        return self.out(mixed_TND.reshape(rows, heads * dim))

    def _normalise(self, qkv_TND: Tensor) -> None:
        heads, kv_heads = self.heads, self.kv_heads
        assert self.norms is not None
        for norm, span in zip(self.norms, (slice(0, heads), slice(heads, heads + kv_heads)), strict=True):
            x = qkv_TND[:, span]
            qkv_TND[:, span] = F.rms_norm(x, (self.head_dim,), norm.weight, norm.variance_epsilon)


def rotate_half_(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> None:
    """Rotary positions in place on the first R dimensions; `sin_T1R` has the sign of rotate-half in its first half."""
    rotary = cos_T1R.shape[-1]
    if rotary < x_TND.shape[-1]:
        x_TND = x_TND[..., :rotary]
    swapped = x_TND.roll(rotary // 2, -1)
    x_TND.mul_(cos_T1R).addcmul_(swapped, sin_T1R)


class RotaryTable:
    """cos and signed sin of all positions, computed once by the model's own rotary module.

    Args:
        rotary_emb: transformers' module: (x, position_ids) -> (cos, sin), [1, T, R] each.
        capacity: positions.
        dtype, device: of the activations.
    """

    def __init__(self, rotary_emb: nn.Module, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        like = torch.zeros(1, dtype=dtype, device=device)
        cos, sin = rotary_emb(like, torch.arange(capacity, device=device)[None])
        half = sin.shape[-1] // 2
        self.cos_P1R = cos[0, :, None].contiguous()
        self.sin_P1R = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], dim=-1).contiguous()

    def block(self, start: int, rows: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin [rows, 1, R] from position `start` on."""
        return self.cos_P1R[start : start + rows], self.sin_P1R[start : start + rows]
