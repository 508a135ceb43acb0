"""Who says which experts verifying a drafted token would touch: one interface for predictors of any kind.

A predictor follows a request from outside the target: `begin` with the prompt, then, cycle by cycle, `predict` for the
tree that was drafted and `commit` for the tokens that were emitted. The root of a tree is the pending token: the last
of the prompt, or the last that was emitted. What the draft router predicts for free comes with the tree itself
(`decode_tree.SelfTreeDrafter`); with `NoPredictor` that is all there is.

Shape suffixes: N nodes, L MoE layers, k top-k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.tree import DraftTree
from moexp.runtime.engine.engine import VERIFY, Block, Engine

Routing = NDArray[np.int16]


class ExpertPredictor(Protocol):
    """Predicts routing for the nodes of draft trees, one request at a time."""

    def begin(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Forget the request before. The prompt's last token is pending."""

    def predict(self, tree: DraftTree) -> Routing | None:
        """Experts [N, L, k] of every node given its path, by descending weight; None where nothing is predicted.

        Nothing is changed: the next tree may start from the same pending token.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens were emitted after the pending one; the last of them is pending now."""


class TextPredictor(Protocol):
    """A predictor that reads tokens: `moexp.runtime.predictors.model.PredictorSession`."""

    def restart(self) -> None: ...

    def extend(self, tokens: Sequence[int]) -> None: ...

    def flush(self) -> None: ...

    def predict_tree(self, tree: DraftTree) -> Routing: ...


class NoPredictor:
    """Predicts nothing."""

    def begin(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        pass

    def predict(self, tree: DraftTree) -> Routing | None:
        return None

    def commit(self, tokens: Sequence[int]) -> None:
        pass


class LearnedPredictor:
    """A trained predictor (EcoSpec, section 4.1).

    Args:
        session: its own; one for each request that is decoded at the same time.
    """

    def __init__(self, session: TextPredictor) -> None:
        self._session = session
        self._pending = -1

    def begin(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        self._session.restart()
        self._session.extend(prompt_ids[:-1])
        self._session.flush()  # with the prompt, not within the first cycle
        self._pending = int(prompt_ids[-1])

    def predict(self, tree: DraftTree) -> Routing | None:
        assert int(tree.tokens_N[0]) == self._pending, "the root is not the pending token"
        return self._session.predict_tree(tree)

    def commit(self, tokens: Sequence[int]) -> None:
        self._session.extend([self._pending, *tokens[:-1]])
        self._pending = int(tokens[-1])


Recording = dict[bytes, Routing]
"""Routing of whole trees by `tree_key`."""


def tree_key(before: Sequence[int], tree: DraftTree) -> bytes:
    """What a tree's routing depends on: the tokens before its root, and its own with their parents."""
    digest = hashlib.sha256()
    for part in (np.array(before, dtype="<i8"), tree.tokens_N.astype("<i8"), tree.parents_N.astype("<i8")):
        digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    return digest.digest()


class OraclePredictor:
    """The target's own routing of every node, recorded offline (EcoSpec, appendix B.3): an upper bound, not a method.

    A first run, with an engine, records what it is asked for; a run that is timed replays the recording, without one.
    The decoded tokens, and so the trees, of both runs are the same.

    Args:
        recording: filled in, and looked up before anything is run.
        engine: over the same target with a resident store of its own, so that no count or time of the store that is
            measured is touched; None to replay only.
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

    def predict(self, tree: DraftTree) -> Routing | None:
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
        layers = len(engine.spec.moe_layers)
        routing_NLk = np.zeros((len(tree), layers, engine.spec.top_k), dtype=np.int16)
        for nodes in blocks_of(tree, engine.block):
            part = tree.take(nodes)
            out = engine.run(Block(part.tokens_N.tolist(), part.parents_N.tolist()), VERIFY)
            routing_NLk[nodes] = out.routing_LBk.transpose(1, 0, 2)
        return routing_NLk

    def _catch_up(self, engine: Engine) -> None:
        """Bring the text before the pending token into the engine's cache: the prompt as prefill does, then steps."""
        if self._filled is None:
            engine.start(self._capacity)
            engine.prefill(self._text[: self._prompt - 1])
            self._filled = self._prompt - 1
        wanted = len(self._text) - 1
        for begin in range(self._filled, wanted, engine.block):
            engine.run(Block(self._text[begin : min(begin + engine.block, wanted)]), VERIFY)
        self._filled = wanted


def blocks_of(tree: DraftTree, rows: int) -> list[list[int]]:
    """Sets of nodes, each with all ancestors and of at most `rows`, that together cover the tree; in node order.

    Raises:
        MoexpError: a path longer than a block.
    """
    deepest = int(tree.depths_N.max()) + 1
    if deepest > rows:
        raise MoexpError(f"a path of {deepest} nodes in steps of {rows} rows", where="decode.tree.steps")
    blocks: list[list[int]] = []
    waiting = list(range(len(tree)))
    while waiting:
        held: set[int] = set()
        for node in waiting:
            with_node = held | set(tree.path(node))
            if len(with_node) <= rows:
                held = with_node
        blocks.append(sorted(held))
        waiting = [node for node in waiting if node not in held]
    return blocks
