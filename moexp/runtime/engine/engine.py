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


@dataclass(frozen=True)
class Block:
    """Tokens to run, the pending one first. With `parents` (-1 for the first, parents before their children) they form
    a tree, else a chain.
    """

    ids: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass
class RequestState:
    """One request's state in an engine.

    Attributes:
        cache: keys and values.
        features: what the draft head reads of the positions run since `Engine.take_features`.
        tree_kv: keys and values of the last tree's nodes, by layer.
    """

    cache: BlockCache
    features: list[Tensor] = field(default_factory=list)
    tree_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def restore(self, cache: BlockCache, features: Sequence[Tensor], length: int) -> None:
        """Hold the first `length` positions of `cache` (this state's own or another's) and these features."""
        self.cache.copy_rows(cache, length)
        self.features = list(features)


@dataclass
class _Run:
    """One request's block on its way through the layers; `x_TH` is its hidden states."""

    block: Block
    state: RequestState
    context: BlockContext
    x_TH: Tensor
    routing: list[np.ndarray] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


class EngineObserver(Protocol):
    """Receives everything that an engine asks of its store, and may keep the arrays."""

    def passed(self, path: StepPath, routings: list[list[np.ndarray]]) -> None:
        """A step is through the layers: each block's live rows' ids [B, k] by MoE layer, by descending gate."""

    def prefetched(self, routing_Lk: np.ndarray) -> None:
        """Experts of one token were announced outside of a step."""


class Engine:
    """Runs steps of a target. A request begins with `start` and `prefill`; each step then extends its cache.

    Args:
        target: what to run.
        store: its experts; weights must be of the target's dtype.
        block: rows of a decoding step; a multiple of 8, and the same for all methods that are compared.
        prefill_rows: rows of a prefill chunk.
        draft_experts: for paths that use them.
        draft_head: for tree drafters that read the target's hidden states, which steps then keep (`take_features`).
        predictors: what makes an expert predictor for one request, by name ("learned", "oracle").
        pack: keep packed copies of the resident weights (bf16 on CPU only).

    Attributes:
        kv_multiple: padding of the key/value length: 128, for fp32 512 (torch's CPU attention works through keys in
            runs of 512, and in fp32 a row's bits depend on the length of its last run).
        state: of the request that `prefill`, `run`, `rollback`, `commit` and `take_features` work on.
    """

    def __init__(
        self,
        target: Target,
        store: ExpertStore,
        *,
        block: int = 8,
        prefill_rows: int = 128,
        draft_experts: LayerDrafts | None = None,
        draft_head: DraftHead | None = None,
        predictors: Mapping[str, Callable[[], ExpertPredictor]] | None = None,
        pack: bool = True,
    ) -> None:
        if block < 8 or block % 8:
            raise MoexpError(f"a step of {block} rows", valid="a multiple of 8")
        self.target, self.store = target, store
        self.spec = target.spec
        self.block, self.prefill_rows = block, prefill_rows
        self.dtype, self.device = target.dtype, target.device
        self.kv_multiple = 512 if self.dtype == torch.float32 else 128
        self.draft_experts, self.draft_head = draft_experts, draft_head
        self.predictors = dict(predictors or {})
        config = target.model.config
        # Latent attention has as many expanded key heads as query heads, whatever its config calls them.
        latent = hasattr(config, "kv_lora_rank")
        self._group = 1 if latent else self.spec.num_heads // self.spec.num_kv_heads
        self._base: Any = target.model.model
        self._network = Network.of(target, block=block, draft_experts=draft_experts, pack=pack)
        self._windows = {layer: window_of(config, layer) for layer in range(self.spec.num_layers)}
        self._layer_offsets_L1 = np.arange(len(self.spec.moe_layers))[:, None] * self.spec.num_experts
        self._capacity = 0
        self._observer: EngineObserver | None = None
        self.state: RequestState
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
            self.state = self.new_state()
            windows = {None, *self._windows.values()}
            self._masks = {window: CausalMasks(needed, self.dtype, self.device, window) for window in windows}
            if restructures_attention(self.target):
                self._rotary = RotaryTable(self._base.rotary_emb, needed, self.dtype, self.device)
        self.cache.set_length(0)
        self.state.features.clear()

    def new_state(self) -> RequestState:
        """State for one more request, with room for as many positions as `start` last made."""
        return RequestState(BlockCache(self.spec.num_layers, self._capacity, self.kv_multiple))

    def activate(self, state: RequestState) -> None:
        """Go on with the request whose state this is; it comes from `new_state`, or was `state` before."""
        self.state = state

    def observe(self, observer: EngineObserver | None) -> None:
        """Report every step and prefetch to `observer` from now on; None: to nobody."""
        self._observer = observer

    @property
    def cache(self) -> BlockCache:
        """Keys and values of the current request."""
        return self.state.cache

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self.cache.length

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on."""
        assert 0 <= length <= self.length, (length, self.length)
        self.cache.set_length(length)

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> None:
        """Extend the cache by a prompt, in chunks of `prefill_rows`; gives no logits."""
        for begin in range(0, len(ids), self.prefill_rows):
            self.store.begin_cycle()
            self._run([Block(ids[begin : begin + self.prefill_rows])], [self.state], self.prefill_rows, PREFILL)

    def run(self, block: Block, path: StepPath) -> StepOut:
        """One step of the current request.

        A chain extends the cache. A tree leaves the cache's length as it is: `commit` says which path stands. Every
        row's logits are those of decoding its path token by token, to the bit.

        Args:
            block: 1 to `self.block` tokens; a draft step takes one token, or a tree.
            path: which experts.
        """
        return self.step_batch([block], [self.state], path)[0]

    @torch.no_grad()
    def step_batch(self, blocks: Sequence[Block], states: Sequence[RequestState], path: StepPath) -> list[StepOut]:
        """One step of several requests: an expert that any of them needs is loaded once, and each gets what `run` would
        give it, to the bit.
        """
        narrow = path.phase == "draft" and not path.whole_block and all(block.parents is None for block in blocks)
        outs = []
        for run in self._run(blocks, states, 1 if narrow else self.block, path):
            logits_TV = self._network.head(self._network.final_norm(run.x_TH))
            routing_LBk = np.stack(run.routing).astype(np.int16)
            outs.append(StepOut(logits_TV[: len(run.block.ids)].float(), routing_LBk))
        return outs

    def commit(self, nodes: Sequence[int]) -> None:
        """Extend the cache by one path of the last tree, in order from its root."""
        start = self.length
        at = torch.tensor(nodes, device=self.device)
        for layer, (keys, values) in self.state.tree_kv.items():
            self.cache.write(layer, start, keys[:, :, at], values[:, :, at])
        self.cache.set_length(start + len(nodes))

    def take_features(self) -> Tensor | None:
        """What the draft head reads of the positions run since the last call (draft steps aside), [positions, F]; None
        if there were none.
        """
        features, self.state.features = self.state.features, []
        return torch.cat(features) if features else None

    def expert_ids(self, routing_Lk: np.ndarray) -> list[int]:
        """Routing of one token as numbers that are unique over layers (for unions of experts)."""
        return (routing_Lk + self._layer_offsets_L1).ravel().tolist()

    def prefetch(self, routing_Lk: np.ndarray, top: int | None = None) -> int:
        """Launch transfers of the experts that a token is predicted to use (of each layer the first `top`; None: all);
        returns how many were launched.
        """
        if self._observer is not None:
            self._observer.prefetched(routing_Lk[:, :top])
        layers = zip(self.spec.moe_layers, routing_Lk[:, :top].tolist(), strict=True)
        return self.store.prefetch([(layer, expert) for layer, chosen in layers for expert in chosen])

    def _run(self, blocks: Sequence[Block], states: Sequence[RequestState], rows: int, path: StepPath) -> list[_Run]:
        """Walks the layers, each block padded to `rows`; gives hidden states before the last norm, and routing."""
        lives = [len(block.ids) for block in blocks]
        assert all(0 < live <= rows for live in lives), (lives, rows)
        runs = [self._begin(block, state, rows) for block, state in zip(blocks, states, strict=True)]
        wanted = self.draft_head.feature_layers if self.draft_head is not None and path.phase != "draft" else None
        for number, layer in enumerate(self._network.layers):
            for run in runs:
                run.x_TH = run.x_TH + layer.attend(layer.norm_1(run.x_TH), run.context)
            hidden = [layer.norm_2(run.x_TH) for run in runs]
            if layer.moe is not None:
                outputs, chosen = layer.moe(hidden, lives, path, self.store)
                for run, ids_Bk in zip(runs, chosen, strict=True):
                    run.routing.append(ids_Bk)
            else:
                assert layer.dense is not None
                outputs = [layer.dense(x_TH) for x_TH in hidden]
            for run, output_TH, live in zip(runs, outputs, lives, strict=True):
                run.x_TH = run.x_TH + output_TH
                if wanted and number in wanted:
                    run.features.append(run.x_TH[:live])
        for run, live in zip(runs, lives, strict=True):
            if wanted is not None:
                features = torch.cat(run.features, dim=-1) if wanted else self._network.final_norm(run.x_TH[:live])
                run.state.features.append(features)
            run.state.tree_kv = run.context.tree_kv
            if run.block.parents is None:
                run.state.cache.set_length(run.context.start + live)
        if self._observer is not None:
            self._observer.passed(path, [run.routing for run in runs])
        return runs

    def _begin(self, block: Block, state: RequestState, rows: int) -> _Run:
        # Padding repeats the last token: finite values, and no expert is asked for it.
        padded = [*block.ids, *[block.ids[-1]] * (rows - len(block.ids))]
        context = self._context(rows, state.cache, block.parents)
        return _Run(block, state, context, self._network.embed(torch.tensor(padded, device=self.device)))

    def _context(self, rows: int, cache: BlockCache, parents: Sequence[int] | None) -> BlockContext:
        start = cache.length
        padded = padded_length(start + rows, self.kv_multiple)
        masks = {
            window: (
                band.block(rows, start, padded),
                band.block(rows, start, padded, repeat=self._group) if rows <= self.block else None,
            )
            for window, band in self._masks.items()
        }
        branches = None
        positions_T = torch.arange(start, start + rows, device=self.device)
        if parents is not None:
            branches = branches_of(parents, rows, self.device)
            for branch in branches:
                begin, end = branch.fresh
                positions_T[branch.rows_T[begin:end]] = torch.arange(start + begin, start + end, device=self.device)
        if restructures_attention(self.target):
            rotary = self._rotary.at(slice(start, start + rows) if parents is None else positions_T)
        else:
            rotary = self._base.rotary_emb(torch.zeros(1, dtype=self.dtype, device=self.device), positions_T[None])
        return BlockContext(rows, start, cache, masks, self._windows, rotary, positions_T[None], branches)
