"""The engine of interleaved runs: it keeps the last prompt, so that methods that take turns on it prefill it once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from moexp.runtime.engine.engine import Engine
from moexp.runtime.engine.kv import BlockCache
from moexp.runtime.store.store import ExpertStore


class PromptEngine(Engine):
    """An engine that keeps the last prompt's keys and values.

    Every method's prefill is the same computation, and decoding writes only behind it: nothing else changes.

    Attributes:
        prefill_store: where prompts take their experts from, instead of `store`; the same weights.
        prefill_s: seconds that the prompt took.
    """

    prefill_store: ExpertStore | None = None
    prefill_s = 0.0
    _prompt: tuple[int, ...] = ()
    _prompt_cache: BlockCache | None = None
    _prompt_features: Sequence[Tensor] = ()

    def prefill(self, ids: Sequence[int]) -> None:
        """As the engine's; at once where a cache still holds these very ids, the request's own or another's."""
        prompt = tuple(ids)
        if prompt and prompt == self._prompt and self._prompt_cache is not None:
            self.state.restore(self._prompt_cache, self._prompt_features, len(prompt))
            return
        self._prompt_cache = None  # whatever stops the prefill, what the cache holds then is not a prompt
        decoding = self.store
        self.store = self.prefill_store or decoding
        begin_s = time.perf_counter()
        try:
            super().prefill(ids)
        finally:
            self.store = decoding
        self.prefill_s = time.perf_counter() - begin_s
        self._prompt, self._prompt_cache, self._prompt_features = prompt, self.cache, list(self.state.features)
