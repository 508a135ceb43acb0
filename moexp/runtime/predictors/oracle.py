"""The oracle: the target's own routing of every node, recorded offline.

Shape suffixes: N nodes, L MoE layers, k top-k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.draft_tree import DraftTree, blocks_of
from moexp.runtime.drafters.self_tree import NodeRouting, run_nodes
from moexp.runtime.engine.engine import VERIFY, Block, Engine
from moexp.runtime.predictors.predictor import Routing

Recording = dict[bytes, Routing]
"""Routing of trees by `tree_key`."""


def tree_key(before: Sequence[int], tree: DraftTree) -> bytes:
    """What a tree's routing depends on: the tokens before its root, and its own with their parents."""
    digest = hashlib.sha256()
    for part in (np.array(before, dtype="<i8"), tree.tokens_N.astype("<i8"), tree.parents_N.astype("<i8")):
        digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    return digest.digest()


class OraclePredictor:
    """The target's own routing of every node: an upper bound, not a method.

    A first run, with an engine, records the trees it meets; a run that is timed replays the recording, without one.
    The decoded tokens, and so the trees, of both runs are the same.

    Args:
        recording: filled in, and looked up before anything is run.
        engine: over the same target with a resident store of its own, so that no count or time of the store that is
            measured is touched; None to replay only.

    Paper: EcoSpec section B.3.
    """

    def __init__(self, recording: Recording, engine: Engine | None = None) -> None:
        self.recording, self.engine = recording, engine
        self._text: list[int] = []  # up to the pending token
        self._prompt = self._capacity = 0
        self._filled: int | None = None  # tokens of the text in the engine's cache; None: not started on this request

    def begin(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        self._text = [int(token) for token in prompt_ids]
        self._prompt, self._capacity = len(prompt_ids), len(prompt_ids) + max_new_tokens
        self._filled = None

    def predict(self, tree: DraftTree) -> Routing:
        """As the protocol says.

        Raises:
            MoexpError: no engine, and a tree that was not recorded.
        """
        assert int(tree.tokens_N[0]) == self._text[-1], "the root is not the pending token"
        key = tree_key(self._text[:-1], tree)
        if key not in self.recording:
            if self.engine is None:
                raise MoexpError(
                    "no routing is recorded for this tree",
                    where="decode.tree.predictor",
                    valid="a recording of the same requests with the same drafter and selector",
                )
            self.recording[key] = self._record(self.engine, tree)
        return self.recording[key]

    def commit(self, tokens: Sequence[int]) -> None:
        self._text += [int(token) for token in tokens]

    def _record(self, engine: Engine, tree: DraftTree) -> Routing:
        self._catch_up(engine)
        routing: NodeRouting = {}
        for nodes in blocks_of(tree, engine.block):
            run_nodes(engine, VERIFY, tree, nodes, routing)
        return np.stack([routing[node] for node in range(len(tree))])

    def _catch_up(self, engine: Engine) -> None:
        """Brings the text before the pending token into the engine's cache: the prompt as prefill does, then steps."""
        if self._filled is None:
            engine.start(self._capacity)
            engine.prefill(self._text[: self._prompt - 1])
            self._filled = self._prompt - 1
        wanted = len(self._text) - 1
        for begin in range(self._filled, wanted, engine.block):
            engine.run(Block(self._text[begin : min(begin + engine.block, wanted)]), VERIFY)
        self._filled = wanted
