"""The engine: one step of the target over a key/value cache and an expert store, for AR, drafting and verification.

**One step shape.** A decoding step always runs `block` rows, of which the first `live` count and the rest is
padding; keys are padded to a multiple of `kv_multiple` under a mask. The kernels then are the same whatever the
row's place in the block, its neighbours or what lies behind it in the cache, and so are the bits of its logits: AR
decoding (one live row) and verification (several) cannot differ. Prefill runs in chunks of its own fixed shape, the
same for every method. Draft steps may run fewer rows: drafts need not be exact.

Shape suffixes: T rows of a block (B live ones of it), H hidden size, V vocabulary, L MoE layers, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.runtime.engine.attention import BlockContext, RotaryTable, branches_of
from moexp.runtime.engine.kv import BlockCache, CausalMasks, padded_length
from moexp.runtime.engine.layers import LayerDrafts, Network, restructures_attention
from moexp.runtime.engine.moe import StepPath
from moexp.runtime.store.store import ExpertStore
from moexp.target.families import window_of
from moexp.target.heads.head import DraftHead
from moexp.target.load import Target

if TYPE_CHECKING:
    from moexp.runtime.predictors.predictor import ExpertPredictor

PREFILL = StepPath("prefill")
AR = StepPath("ar")
VERIFY = StepPath("verify")


@dataclass(frozen=True)
class StepOut:
    """What a step saw.

    Attributes:
        logits_BV: fp32 logits of the live rows.
        routing_LBk: int16 ids of the router's full top-k in each MoE layer, by descending gate.
    """

    logits_BV: Tensor
    routing_LBk: np.ndarray


@dataclass
class Lane:
    """One request's state in an engine: its cache, and what its last tree and its draft head need.

    Attributes:
        cache: keys and values.
        features: what the draft head reads of the positions run since they were last taken.
        tree_start: positions before the last tree.
        tree_kept: keys and values of its nodes, by layer.
    """

    cache: BlockCache
    features: list[Tensor] = field(default_factory=list)
    tree_start: int = 0
    tree_kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """Tokens to run, the pending one first; with `parents` (-1 for the first) they form a tree."""

    ids: Sequence[int]
    parents: Sequence[int] | None = None


class EngineObserver(Protocol):
    """Told of everything that an engine asks of its store. What it is given is kept by nobody else."""

    def passed(self, path: StepPath, routings: list[list[np.ndarray]]) -> None:
        """A step is through the layers: each block's live rows' ids [B, k] by MoE layer, by descending gate."""

    def prefetched(self, routing_Lk: np.ndarray) -> None:
        """Experts of one token were announced outside of a step."""


class Engine:
    """Runs steps of a target. One request at a time: `start`, then steps, each of which extends the cache.

    Args:
        target: what to run.
        store: its experts; weights must be of the target's dtype.
        block: rows of a decoding step; a multiple of 8, and the same for all methods that are compared.
        draft_rows: rows of a draft step (1, or `block`).
        prefill_rows: rows of a prefill chunk.
        kv_multiple: padding of the key/value length; by default 128, for fp32 512 (torch's CPU attention works through
            keys in runs of 512, and in fp32 a row's bits depend on the length of its last run).
        draft_experts: for paths that use them.
        draft_head: for tree drafters that read the target's hidden states, which steps then keep (`take_features`).
        predictors: what makes an expert predictor for one request, by name ("learned", "oracle").
        restructured: use the restructured attention, routing and feed-forward where the family has them;
            otherwise transformers' own modules throughout.
        pack: keep packed copies of the resident weights (bf16 on CPU only).

    Attributes:
        observer: told of every step and prefetch; None: nobody.
    """

    def __init__(
        self,
        target: Target,
        store: ExpertStore,
        *,
        block: int = 8,
        draft_rows: int = 1,
        prefill_rows: int = 128,
        kv_multiple: int | None = None,
        draft_experts: LayerDrafts | None = None,
        draft_head: DraftHead | None = None,
        predictors: Mapping[str, Callable[[], ExpertPredictor]] | None = None,
        restructured: bool = True,
        pack: bool = True,
    ) -> None:
        if block < 8 or block % 8:
            raise MoexpError(f"a step of {block} rows", valid="a multiple of 8")
        self.target, self.store = target, store
        self.spec = target.spec
        self.block, self.draft_rows, self.prefill_rows = block, draft_rows, prefill_rows
        self.dtype, self.device = target.dtype, target.device
        self.kv_multiple = kv_multiple or (512 if self.dtype == torch.float32 else 128)
        self.draft_experts, self.draft_head = draft_experts, draft_head
        self.predictors = dict(predictors or {})
        # Latent attention has as many expanded key heads as query heads, whatever its config calls them.
        latent = hasattr(target.model.config, "kv_lora_rank")
        self._group = 1 if latent else self.spec.num_heads // self.spec.num_kv_heads
        self._fused = restructures_attention(target, restructured)
        self._base: Any = target.model.model
        self._network = Network.of(
            target,
            block=block,
            draft_rows=draft_rows,
            draft_experts=draft_experts,
            restructured=restructured,
            pack=pack and restructured,
        )
        config = target.model.config
        windows = {layer: window_of(config, layer) for layer in range(self.spec.num_layers)}
        self._windows = {layer: window for layer, window in windows.items() if window is not None}
        self._layer_offsets_L1 = np.arange(len(self.spec.moe_layers))[:, None] * self.spec.num_experts
        self._capacity = 0
        self.observer: EngineObserver | None = None
        self.lane: Lane
        self.start(self.kv_multiple)

    def start(self, capacity: int) -> None:
        """Forget the request before and make room for `capacity` positions.

        Raises:
            MoexpError: longer than the target's context.
        """
        if capacity > self.spec.max_positions:
            raise MoexpError(f"prompt and answer need {capacity} positions", valid=f"up to {self.spec.max_positions}")
        # Behind the last position a padded block must fit.
        needed = padded_length(capacity + max(self.block, self.prefill_rows), self.kv_multiple)
        if needed > self._capacity:
            self._capacity = needed
            self.lane = self.new_lane()
            self._masks = CausalMasks(needed, self.dtype, self.device)
            self._window_masks = {
                window: CausalMasks(needed, self.dtype, self.device, window) for window in set(self._windows.values())
            }
            if self._fused:
                self._rotary = RotaryTable(self._base.rotary_emb, needed, self.dtype, self.device)
        self.cache.reset()
        self.lane.features.clear()

    def new_lane(self) -> Lane:
        """State for one more request, with room for as many positions as `start` last made. Assigned to `lane`, it is
        what all other methods work on.
        """
        return Lane(BlockCache(self.spec.num_layers, self._capacity, self.kv_multiple))

    @property
    def cache(self) -> BlockCache:
        """Keys and values of the current lane."""
        return self.lane.cache

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self.cache.length

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on, by the cache's own API."""
        self.cache.crop(length - self.cache.length)

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> None:
        """Extend the cache by a prompt, in chunks of `prefill_rows`; gives no logits."""
        for begin in range(0, len(ids), self.prefill_rows):
            self.store.begin_cycle()
            self._run([Block(ids[begin : begin + self.prefill_rows])], [self.lane], self.prefill_rows, PREFILL)

    @torch.no_grad()
    def step(self, ids: Sequence[int], path: StepPath) -> StepOut:
        """Extend the cache by a block of tokens and give each row's logits.

        Args:
            ids: 1 to `block` tokens; of a draft step, 1 to `draft_rows`.
            path: which experts.
        """
        return self.run(Block(ids), path)

    @torch.no_grad()
    def step_tree(self, ids: Sequence[int], parents: Sequence[int], path: StepPath) -> StepOut:
        """Run a block of tokens that form a tree; `commit` then says which of its paths stands.

        Every row's logits are those of decoding its path token by token, to the bit.

        Args:
            ids: 1 to `block` tokens, the pending one first.
            parents: node that each continues, -1 for the first; parents stand before their children.
            path: which experts.
        """
        return self.run(Block(ids, parents), path)

    @torch.no_grad()
    def run(self, block: Block, path: StepPath) -> StepOut:
        """`step` or `step_tree` of a block, on the current lane."""
        return self.run_many([block], [self.lane], path)[0]

    @torch.no_grad()
    def run_many(self, blocks: Sequence[Block], lanes: Sequence[Lane], path: StepPath) -> list[StepOut]:
        """One step of several requests: an expert that any of them needs is loaded once, and each gets what it would
        alone, to the bit.
        """
        narrow = path.phase == "draft" and not path.whole_block and all(block.parents is None for block in blocks)
        rows = self.draft_rows if narrow else self.block
        outs = []
        for block, (x_TH, routing) in zip(blocks, self._run(blocks, lanes, rows, path), strict=True):
            logits_TV = self._network.head(self._network.final_norm(x_TH))
            outs.append(StepOut(logits_TV[: len(block.ids)].float(), np.stack(routing).astype(np.int16)))
        return outs

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the keys and values of one path of the last tree, in order from its root; forget the rest."""
        self.rollback(self.lane.tree_start)
        at = torch.tensor(nodes, device=self.device)
        for layer, (keys, values) in self.lane.tree_kept.items():
            self.cache.update(keys[:, :, at], values[:, :, at], layer)

    def take_features(self) -> Tensor | None:
        """What the draft head reads of the positions run since the last call (draft steps aside), [positions, F]; None
        if there were none.
        """
        kept, self.lane.features = self.lane.features, []
        return torch.cat(kept) if kept else None

    def expert_ids(self, routing_Lk: np.ndarray) -> list[int]:
        """Routing of one token as numbers that are unique over layers (for unions of experts)."""
        return (routing_Lk + self._layer_offsets_L1).ravel().tolist()

    def prefetch(self, routing_Lk: np.ndarray, top: int | None = None) -> int:
        """Launch transfers of the experts that a token is predicted to use (of each layer the first `top`; None: all);
        returns how many were launched.
        """
        if self.observer is not None:
            self.observer.prefetched(routing_Lk[:, :top])
        layers = zip(self.spec.moe_layers, routing_Lk[:, :top].tolist(), strict=True)
        return self.store.prefetch([(layer, expert) for layer, chosen in layers for expert in chosen])

    def _run(
        self, blocks: Sequence[Block], lanes: Sequence[Lane], rows: int, path: StepPath
    ) -> list[tuple[Tensor, list[np.ndarray]]]:
        """Hidden states [rows, H] before the last norm, and routing by MoE layer, of each block."""
        lives, starts = [len(block.ids) for block in blocks], [lane.cache.length for lane in lanes]
        assert all(0 < live <= rows for live in lives), (lives, rows)
        contexts = [self._context(rows, lane.cache, block.parents) for lane, block in zip(lanes, blocks, strict=True)]
        # Padding repeats the last token: finite values, and no expert is asked for it.
        padded = [[*block.ids, *[block.ids[-1]] * (rows - len(block.ids))] for block in blocks]
        xs = [self._network.embed(torch.tensor(ids, device=self.device)) for ids in padded]
        routings: list[list[np.ndarray]] = [[] for _ in blocks]
        wanted = self.draft_head.feature_layers if self.draft_head is not None and path.phase != "draft" else None
        seen: list[list[Tensor]] = [[] for _ in blocks]
        for number, layer in enumerate(self._network.layers):
            xs = [x_TH + layer.attend(layer.norm_1(x_TH), context) for x_TH, context in zip(xs, contexts, strict=True)]
            hidden = [layer.norm_2(x_TH) for x_TH in xs]
            if layer.moe is not None:
                outputs = []
                for routing, (output_TH, chosen) in zip(
                    routings, layer.moe.many(hidden, lives, path, self.store), strict=True
                ):
                    outputs.append(output_TH)
                    routing.append(chosen)
            else:
                assert layer.dense is not None
                outputs = [layer.dense(hidden_TH) for hidden_TH in hidden]
            xs = [x_TH + output_TH for x_TH, output_TH in zip(xs, outputs, strict=True)]
            if wanted and number in wanted:
                for taken, x_TH, live in zip(seen, xs, lives, strict=True):
                    taken.append(x_TH[:live])
        for block, lane, context, x_TH, taken, live, start in zip(
            blocks, lanes, contexts, xs, seen, lives, starts, strict=True
        ):
            if wanted is not None:
                lane.features.append(torch.cat(taken, dim=-1) if wanted else self._network.final_norm(x_TH[:live]))
            lane.tree_start, lane.tree_kept = start, context.kept
            kept = start + live if block.parents is None else start
            lane.cache.crop(kept - lane.cache.length)
        if self.observer is not None:
            self.observer.passed(path, routings)
        return list(zip(xs, routings, strict=True))

    def _context(self, rows: int, cache: BlockCache, parents: Sequence[int] | None) -> BlockContext:
        start = cache.length
        padded = padded_length(start + rows, self.kv_multiple)

        def masks(band: CausalMasks) -> tuple[Tensor, Tensor | None]:
            packed = band.block(rows, start, padded, repeat=self._group) if rows <= self.block else None
            return band.block(rows, start, padded), packed

        mask_TK, mask_GTK = masks(self._masks)
        by_window = {window: masks(band) for window, band in self._window_masks.items()}
        windowed = {layer: by_window[window] for layer, window in self._windows.items()}
        branches = None
        positions = torch.arange(start, start + rows, device=self.device)
        if parents is not None:
            branches = branches_of(parents, rows, self.device)
            for branch in branches:
                begin, end = branch.fresh
                positions[branch.rows_T[begin:end]] = torch.arange(start + begin, start + end, device=self.device)
        if self._fused:
            rotary = self._rotary.block(start, rows) if branches is None else self._rotary.at(positions)
            return BlockContext(rows, mask_TK, mask_GTK, cache, rotary, branches=branches, windowed=windowed)
        positions = positions[None]
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        rotary = self._base.rotary_emb(like, positions)
        return BlockContext(rows, mask_TK, mask_GTK, cache, rotary, positions, branches, windowed=windowed)
