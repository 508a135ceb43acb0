"""Trees from a draft head in the decoding loop: exact, incremental, and with the head's own view of every node."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moexp.base.errors import MoexpError
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method, TreePlan
from moexp.runtime.drafters.draft_tree import TreeShape
from moexp.runtime.drafters.head_tree import HeadTreeDrafter
from moexp.runtime.engine.engine import VERIFY, Block, Engine
from moexp.runtime.store.opening import open_store
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.heads.draft_vocab import DraftVocab
from moexp.target.heads.eagle_head import EagleConfig, new_eagle_head
from moexp.target.heads.mtp_head import new_mtp_head
from moexp.target.load import load_target
from tests.engines import logits_to, prompt
from tests.trees import full_size

pytestmark = pytest.mark.e2e

HEADS = ["eagle3", "mtp"]
SHAPE = TreeShape(steps=3, width=2, beam=2)


def engine_with(folder, kind: str, dtype=torch.bfloat16) -> Engine:
    target = load_target(folder, dtype=dtype)
    torch.manual_seed(1)
    head: Any
    if kind == "mtp":
        head = new_mtp_head(target.model, seed=3)
    else:
        config = EagleConfig.for_target(target.model.config, 128)
        vocab = DraftVocab.from_ids(range(64, 192), target.model.config.vocab_size)
        head = new_eagle_head(config, vocab, target.model.get_input_embeddings(), seed=3)
    store = open_store(target.index, "resident", dtype=dtype)
    return Engine(target, store, draft_head=head.to(dtype).eval(), prefill_rows=32)


def head_method(**options: Any) -> Method:
    return Method(
        "head", tree=TreePlan(options.pop("shape", SHAPE), selector="confidence", predictor="none", **options)
    )


@pytest.mark.parametrize("kind", HEADS)
def test_decoding_with_a_head_gives_the_logits_of_plain_decoding(tiny_folder, kind):
    engine = engine_with(tiny_folder(), kind)
    for length in (1, 2, 40):
        ids = prompt(length, length)
        found = []
        for method in (Method(), head_method(), head_method(gamma=4)):
            logits: list[torch.Tensor] = []
            _, record = decode_all(
                engine,
                ids,
                method,
                Sampling(),
                max_new_tokens=20,
                on_cycle=logits_to(logits),
            )
            found.append((record.tokens, torch.cat(logits)))
        for tokens, rows in found[1:]:
            assert tokens == found[0][0] and torch.equal(rows, found[0][1])


@pytest.mark.parametrize("kind", HEADS)
def test_after_cycles_a_head_drafts_what_it_would_from_scratch(tiny_folder, kind):
    """The cache of true pairs, built cycle by cycle, is that of one pass over the whole text."""
    engine = engine_with(tiny_folder(), kind, torch.float32)
    ids = prompt(10)
    _, record = decode_all(engine, ids, head_method(), Sampling(), max_new_tokens=12)
    text = [*ids, *record.tokens]

    def tree_after(tokens: list[int]):
        engine.start(len(tokens) + 8)
        engine.prefill(tokens[:-1])
        return HeadTreeDrafter(engine, SHAPE, tokens)

    grown = tree_after(text).grow(text[-1], 3)[0]
    by_cycles = tree_after(ids)
    at = len(ids)
    for size in (1, 3, 2, 6):
        engine.run(Block(text[at - 1 : at - 1 + size]), VERIFY)
        by_cycles.commit(list(range(size)), text[at : at + size])
        at += size
    again = by_cycles.grow(text[-1], 3)[0]
    assert again.tokens_N.tolist() == grown.tokens_N.tolist()
    assert torch.allclose(torch.tensor(again.log_probs_N), torch.tensor(grown.log_probs_N), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", HEADS)
def test_each_node_is_scored_as_on_its_own_path(tiny_folder, kind):
    engine = engine_with(tiny_folder(), kind, torch.float32)
    ids = prompt(10)
    engine.start(40)
    engine.prefill(ids[:-1])
    drafter = HeadTreeDrafter(engine, SHAPE, ids)
    tree, _ = drafter.grow(ids[-1], 3)
    assert len(tree) == full_size(SHAPE)
    head: Any = engine.draft_head
    for node in range(1, len(tree)):
        path = tree.path(node)
        state: Any = drafter._root_H
        pairs = drafter.cache.length
        for step, above in enumerate(path[1:]):
            log_probs = head.logits(state[None, None])[0, 0].log_softmax(-1)
            token = int(tree.tokens_N[above])
            assert float(log_probs[int(head.draft_ids(torch.tensor(token)))]) == pytest.approx(
                tree.log_probs_N[above], abs=1e-4
            )
            state = head(
                torch.tensor([[token]]), state[None, None], torch.tensor([[pairs + step]]), None, drafter.cache
            )[0, 0]
        drafter.cache.rollback(pairs)


def test_a_head_needs_a_tree_and_no_draft_router(tiny_folder):
    engine = engine_with(tiny_folder(), "mtp")
    for method, message in (
        (Method("head"), "a head drafts trees"),
        (Method("head", tree=TreePlan()), "a head has no draft router"),
    ):
        with pytest.raises(MoexpError, match=message):
            decode_all(engine, prompt(5), method, Sampling(), max_new_tokens=4)
    engine.draft_head = None
    with pytest.raises(MoexpError, match="no draft head is loaded"):
        decode_all(engine, prompt(5), head_method(), Sampling(), max_new_tokens=4)
