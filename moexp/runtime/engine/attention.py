"""Attention of one decoder layer over the block cache: transformers' own module, or a restructured grouped-query one.

Either way a block's own keys and values are computed from its rows alone, written into the cache, and attended to
together with those before: nothing is ever recomputed over the whole padded length, whose kernels would change with
it.

Shape suffixes: T rows of a block, H hidden size, N query heads, M key/value heads, G = N / M, D head dimension,
R rotary dimensions, P positions, K padded key/value length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moexp.runtime.engine.kv import BlockCache
from moexp.runtime.engine.linear import fuse_linears, make_linear

BLOCK_ATTENTION = "moexp_block"
"""Name under which transformers' attention modules find `attend_block`."""


@dataclass
class BlockContext:
    """What all layers of one step share.

    Attributes:
        rows: T, padding included.
        start: position of the first row.
        cache: where keys and values go.
        masks: by attention window (None: no window): the additive causal mask [T, K], and the same repeated for each
            query head of a group, [G * T, K], where a group's queries are packed into one problem, else None.
        windows: attention window by layer.
        rotary: cos_T1R and signed sin_T1R (restructured attention), or what the model's own rotary module gave.
        positions: [1, T], for transformers' own modules.
        branches: of a tree: its root-to-leaf paths; None where the block is one chain.
        tree_kv: of a tree: keys and values of the block's rows, by layer, for the path that is accepted.
    """

    rows: int
    start: int
    cache: BlockCache
    masks: Mapping[int | None, tuple[Tensor, Tensor | None]]
    windows: Mapping[int, int | None]
    rotary: Any
    positions: Tensor
    branches: Sequence[Branch] | None = None
    tree_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Branch:
    """One root-to-leaf path of a tree, as the chain that it would be alone.

    Attributes:
        rows_T: its rows in order, padded to T by repeating the last.
        fresh: its span (from, to) of rows that no earlier branch had: their results come from this one.
    """

    rows_T: Tensor
    fresh: tuple[int, int]


def branches_of(parents: Sequence[int], rows: int, device: torch.device) -> list[Branch]:
    """The branches of a tree given by each node's parent (-1 for the root), parents before children.

    Args:
        rows: T, nodes at least.
    """
    inner = set(parents)
    seen: set[int] = set()
    branches = []
    for leaf in (node for node in range(len(parents)) if node not in inner):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        first = next(depth for depth, node in enumerate(path) if node not in seen)
        seen.update(path)
        padded = torch.tensor([*path, *[leaf] * (rows - len(path))], device=device)
        branches.append(Branch(padded, (first, len(path))))
    return branches


@dataclass(frozen=True)
class AttendSpec:
    """How a layer attends.

    Attributes:
        layer: decoder layer.
        scaling: of queries times keys.
        sinks_N: a logit a head that takes part in the softmax and leads nowhere, or None.
    """

    layer: int
    scaling: float
    sinks_N: Tensor | None = None


def attend_block(q_1NTD: Tensor, k_1MTD: Tensor, v_1MTD: Tensor, block: BlockContext, spec: AttendSpec) -> Tensor:
    """Write the block's keys and values into the cache, and attend to all up to each row's own.

    A tree is attended to branch by branch, each as the chain it would be alone: the order of keys, and so every bit, is
    that of decoding the branch token by token. What the cache then holds behind the verified prefix is the last
    branch's.

    Returns:
        [T, N, D of the values].
    """
    value_dim = v_1MTD.shape[-1]
    if value_dim < k_1MTD.shape[-1] and v_1MTD.device.type == "cpu":
        # torch's fused CPU attention wants equal dimensions; its fallback sums over the padded length in one product.
        v_1MTD = F.pad(v_1MTD, (0, k_1MTD.shape[-1] - value_dim))
    if block.branches is None:
        return _attend_chain(q_1NTD, k_1MTD, v_1MTD, block, spec)[..., :value_dim]
    block.tree_kv[spec.layer] = (k_1MTD, v_1MTD)
    mixed_TND = q_1NTD.new_empty(block.rows, q_1NTD.shape[1], v_1MTD.shape[-1])
    for branch in block.branches:
        at_T = branch.rows_T
        one_TND = _attend_chain(q_1NTD[:, :, at_T], k_1MTD[:, :, at_T], v_1MTD[:, :, at_T], block, spec)
        begin, end = branch.fresh
        mixed_TND[at_T[begin:end]] = one_TND[begin:end]
    return mixed_TND[..., :value_dim]


def _attend_chain(q_1NTD: Tensor, k_1MTD: Tensor, v_1MTD: Tensor, block: BlockContext, spec: AttendSpec) -> Tensor:
    mask_TK, mask_GTK = block.masks[block.windows.get(spec.layer)]
    rows, heads, kv_heads = block.rows, q_1NTD.shape[1], k_1MTD.shape[1]
    group = heads // kv_heads
    keys, values = block.cache.write(spec.layer, block.start, k_1MTD, v_1MTD)
    q_MGTD = q_1NTD.view(kv_heads, group, rows, -1)
    if mask_GTK is not None:
        query, mask = q_MGTD.reshape(1, kv_heads, group * rows, -1), mask_GTK
    else:  # many rows: one problem a query head, over the same keys (expanded, not copied)
        query, mask = q_MGTD, mask_TK
        keys = keys[0, :, None].expand(-1, group, -1, -1)
        values = values[0, :, None].expand(-1, group, -1, -1)
    if spec.sinks_N is None:
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scaling)
    else:
        mixed, weight = _attention_and_weight(query, keys, values, mask, spec.scaling)
        sinks_MGT = spec.sinks_N.float().view(kv_heads, group, 1).expand(-1, -1, rows)
        # The sink's share of the softmax is e^sink / (e^sink + e^weight): the keys' outputs keep the rest.
        mixed = (mixed * torch.sigmoid(weight - sinks_MGT.reshape(weight.shape))[..., None]).to(mixed.dtype)
    return mixed.reshape(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)


def _attention_and_weight(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention, and for each row the logarithm of its softmax's denominator (fp32, [.., rows])."""
    if query.device.type == "cpu":  # the kernel behind torch's own attention, which keeps that to itself
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, weight = kernel(query, keys, values, attn_mask=mask, scale=scaling)
        return mixed, weight
    scores = (query.float() @ keys.float().transpose(-1, -2)) * scaling + mask
    return (scores.softmax(-1) @ values.float()).to(query.dtype), scores.logsumexp(-1)


def _module_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    moexp_block: BlockContext,
    scaling: float,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    return attend_block(query, key, value, moexp_block, AttendSpec(module.layer_idx, scaling, s_aux))[None], None


ALL_ATTENTION_FUNCTIONS.register(BLOCK_ATTENTION, _module_attention)


class ModuleAttention:
    """transformers' own attention module, with `attend_block` in the place of its attention function.

    It is called without a cache, so that it computes keys and values of the block's rows alone (latent attention
    would otherwise expand the whole cache anew each step).
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.config = copy.copy(module.config)
        self.config._attn_implementation = BLOCK_ATTENTION

    def __call__(self, x_TH: Tensor, block: BlockContext) -> Tensor:
        module = self.module
        # The target may be run otherwise as well: it keeps its own attention function between our calls.
        module.config, own = self.config, module.config
        try:
            output, *_ = module(
                hidden_states=x_TH[None],
                position_embeddings=block.rotary,
                attention_mask=None,  # `attend_block` has its own
                cache=None,
                position_ids=block.positions,
                moexp_block=block,
            )
        finally:
            module.config = own
        return output[0]


class GroupedAttention:
    """Grouped-query attention with rotate-half rotary positions, with few kernel calls.

    Query, key and value are one multiplication; rotary positions are applied to queries and keys together, in place.

    Args:
        module: a transformers attention module with q_proj, k_proj, v_proj, o_proj (and perhaps q_norm, k_norm).
        num_heads, num_kv_heads: N and M.
        rows, pack: as in `make_linear`.
    """

    def __init__(self, module: Any, num_heads: int, num_kv_heads: int, *, rows: int, pack: bool) -> None:
        weight, bias = fuse_linears([module.q_proj, module.k_proj, module.v_proj])
        self.qkv = make_linear(weight, bias, rows=rows, pack=pack)
        self.out = make_linear(module.o_proj.weight, module.o_proj.bias, rows=rows, pack=pack)
        self.spec = AttendSpec(module.layer_idx, module.scaling)
        self.heads, self.kv_heads, self.head_dim = num_heads, num_kv_heads, module.head_dim
        # Qwen3 always normalises queries and keys a head, GLM-4.5 where its config says so.
        self.norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None

    def __call__(self, x_TH: Tensor, block: BlockContext) -> Tensor:
        heads, keys_end = self.heads, self.heads + self.kv_heads
        qkv_TND = self.qkv(x_TH).view(block.rows, keys_end + self.kv_heads, self.head_dim)
        if self.norms is not None:
            for norm, span in zip(self.norms, (slice(0, heads), slice(heads, keys_end)), strict=True):
                normed = F.rms_norm(qkv_TND[:, span], (self.head_dim,), norm.weight, norm.variance_epsilon)
                qkv_TND[:, span] = normed
        rotate_half_(qkv_TND[:, :keys_end], *block.rotary)
        qkv_1NTD = qkv_TND.transpose(0, 1)[None]
        q_1NTD, k_1MTD, v_1MTD = qkv_1NTD.tensor_split((heads, keys_end), dim=1)
        mixed_TND = attend_block(q_1NTD, k_1MTD, v_1MTD, block, self.spec)
        return self.out(mixed_TND.reshape(block.rows, -1))


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

    def at(self, positions_T: Tensor | slice) -> tuple[Tensor, Tensor]:
        """cos and signed sin [T, 1, R] of these positions."""
        return self.cos_P1R[positions_T], self.sin_P1R[positions_T]
