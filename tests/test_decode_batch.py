"""Batches: each request gets what it gets alone, and what several need is loaded once."""

from __future__ import annotations

import pytest
import torch

from moexp.base.errors import MoexpError
from moexp.runtime.decoding.decode import decode_all, decode_batch
from moexp.runtime.decoding.method import Method, TreePlan
from moexp.runtime.engine.engine import VERIFY, Block
from moexp.runtime.verifiers.sampling import Sampling
from tests.engines import WatchedStore, make_engine, prompt, swap_store

pytestmark = pytest.mark.e2e

PROMPTS = [prompt(length, length) for length in (20, 3, 1, 33, 9, 140, 2, 17)]
METHODS = [
    Method(),
    Method("top-r", max_draft=3),
    Method("draft-expert", max_draft=4, policy="confidence", tau=0.02, prefetch=True),
    Method("top-r", tree=TreePlan(selector="confidence", predictor="none", gamma=5)),
    Method("draft-expert", prefetch=True, tree=TreePlan(gamma=4)),
]


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return make_engine(tiny_folder(), dtype=torch.bfloat16)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label.replace(" ", "_"))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_request_gets_its_batch_1_output(engine, method, size):
    prompts = PROMPTS[:size]
    greedy = Sampling()
    alone = [decode_all(engine, ids, Method(), greedy, max_new_tokens=14)[1].tokens for ids in prompts]
    stop = {alone[0][6]}  # ends some answers early, at their own places
    cut = [next((ids[: at + 1] for at, token in enumerate(ids) if token in stop), ids) for ids in alone]
    steps, records = decode_batch(engine, prompts, method, greedy, max_new_tokens=14, stop_ids=stop)
    assert [record.tokens for record in records] == cut
    assert [record.finish_reason == "stop" for record in records] == [ids[-1] in stop for ids in cut]
    for record in records:
        assert sum(step.emitted for step in steps if step.request == record.request) == record.new_tokens
    assert {step.batch for step in steps if step.cycle == 0} == {size}


@pytest.mark.parametrize("temperature", [1.0])
def test_sampled_requests_repeat_their_batch_1_output_where_selection_is_their_own(engine, temperature):
    method = Method("top-r", tree=TreePlan(selector="confidence", predictor="none", gamma=5))
    sampling = Sampling(temperature=temperature, seed=5)
    alone = [decode_all(engine, ids, method, sampling, max_new_tokens=12)[1].tokens for ids in PROMPTS[:3]]
    _, records = decode_batch(engine, PROMPTS[:3], method, sampling, max_new_tokens=12)
    assert [record.tokens for record in records] == alone


def test_a_step_of_several_gives_each_its_own_logits_and_asks_for_the_union_once(engine, tiny_folder):
    store = WatchedStore.of(tiny_folder(), dtype=torch.bfloat16)
    before = swap_store(engine, store)
    try:
        engine.start(200)
        states, blocks, alone = [], [], []
        for ids, block in zip(PROMPTS[:3], (Block([5, 6, 7]), Block([8]), Block([1, 2, 3], [-1, 0, 0])), strict=True):
            states.append(engine.new_state())
            engine.activate(states[-1])
            engine.prefill(ids[:-1])
            alone.append(engine.run(block, VERIFY))
            engine.rollback(max(0, len(ids) - 1))
            blocks.append(block)
        store.calls.clear()
        together = engine.step_batch(blocks, states, VERIFY)
    finally:
        swap_store(engine, before)
    for one, many in zip(alone, together, strict=True):
        assert torch.equal(one.logits_BV, many.logits_BV) and (one.routing_LBk == many.routing_LBk).all()
    asked = store.requested("verify")
    assert len(asked) == len(engine.spec.moe_layers) and store.open_tickets == 0
    for place, (layer, keys) in enumerate(zip(engine.spec.moe_layers, asked, strict=True)):
        union = {int(expert) for out in together for expert in out.routing_LBk[place].ravel()}
        assert keys == [(layer, expert) for expert in sorted(union)]


def test_later_requests_choose_nodes_whose_experts_are_loaded_anyway(engine):
    """The same request twice: by marginal cost, all that the first one chose is free for the second."""
    method = Method("draft-expert", tree=TreePlan(gamma=4, epsilon=0.01))
    ids = prompt(12, 3)
    steps, records = decode_batch(engine, [ids, ids], method, Sampling(), max_new_tokens=10)
    assert records[0].tokens == records[1].tokens
    first = [step for step in steps if step.cycle == 0]
    assert first[0].unique_verify == first[1].unique_verify


def test_an_empty_batch_is_an_error(engine):
    nothing: list[list[list[int]]] = [[], [[]]]
    for prompts in nothing:
        with pytest.raises(MoexpError, match="empty batch or prompt"):
            decode_batch(engine, prompts, Method(), Sampling(), max_new_tokens=4)
