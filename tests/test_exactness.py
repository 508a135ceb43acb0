"""The promise: logits of every emitted position are `torch.equal` between AR and every method.

AR over a resident store is the reference; every drafter, truncation policy, prefetch setting, store, cache policy and
budget must reproduce its bits, in bf16 and in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.store.opening import open_store
from moexp.runtime.store.policies import make_policy
from moexp.runtime.store.transfer import StoreOptions
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.families import FAMILIES
from tests.engines import logits_to, make_engine, prompt, swap_store

pytestmark = pytest.mark.e2e

DTYPES = [torch.bfloat16, torch.float32]

METHODS = [
    Method("top-r", r=1),
    Method("top-r", r=2, policy="confidence", tau=0.6),
    Method("top-r", r=3, max_draft=7, policy="confidence-expansion", tau=0.6, budget=4),
    Method("draft-expert"),
    Method("draft-expert", policy="confidence", tau=0.6),
    Method("draft-expert", max_draft=6, policy="confidence-expansion", tau=0.6, budget="cache"),
    Method("target", max_draft=5),
]

STORES: dict[str, dict[str, Any]] = {
    "resident": {"kind": "resident"},
    "host-none": {"kind": "host", "poison": True},
    "disk-none": {"kind": "disk", "poison": True},
    "disk-lru-all": {"kind": "disk", "policy": "lru"},
    "disk-lru-tight": {"kind": "disk", "policy": "lru", "experts": 6, "poison": True},
    "disk-lfu-some": {"kind": "disk", "policy": "lfu", "experts": 20, "poison": True},
    "host-lru-one": {"kind": "host", "policy": "lru", "experts": 1, "poison": True},
}


def bits(engine, method, ids, new_tokens, sampling=None):
    rows: list[torch.Tensor] = []
    _, record = decode_all(
        engine,
        ids,
        method,
        sampling or Sampling(),
        max_new_tokens=new_tokens,
        on_cycle=logits_to(rows),
    )
    return torch.cat(rows), record.tokens


def open_kind(engine, kind, policy="none", experts=None, poison=False):
    index = engine.target.index
    budget = None if experts is None else experts * index.expert_bytes
    return open_store(index, kind, policy=make_policy(policy), budget_bytes=budget, options=StoreOptions(poison=poison))


@pytest.fixture(scope="module", params=DTYPES, ids=["bf16", "fp32"])
def reference(request, tiny_folder):
    """An engine, prompts (one grows over a key/value bucket while decoding) and AR's bits for each."""
    dtype = request.param
    engine = make_engine(tiny_folder(dtype=dtype), dtype, prefill_rows=128)
    runs = []
    for length, new_tokens in ((1, 20), (engine.kv_multiple - 15, 28)):
        ids = prompt(length, seed=length)
        runs.append((ids, new_tokens, *bits(engine, Method(), ids, new_tokens)))
    return engine, runs


PREFETCH = ("inline", "no-prefetch", "when-kept")


def combinations():
    """Every method with every store and prefetch setting; of each pair, two of three settings are in the slow
    suite.
    """
    for i, method in enumerate(METHODS):
        for j, store in enumerate(STORES):
            for prefetch in PREFETCH:
                marks = () if prefetch == PREFETCH[(i + j) % len(PREFETCH)] else pytest.mark.slow
                name = f"{method.label.replace(' ', '-')}-{store}-{prefetch}"
                yield pytest.param(method, store, prefetch, id=name, marks=marks)


@pytest.mark.parametrize(("method", "store", "prefetch"), list(combinations()))
def test_bits_are_ars(reference, method, store, prefetch):
    engine, runs = reference
    method = replace(
        method,
        prefetch=prefetch != "no-prefetch",
        prefetch_inline=prefetch != "when-kept",
    )
    opened = open_kind(engine, **STORES[store])
    before = swap_store(engine, opened)
    try:
        for ids, new_tokens, logits, tokens in runs if store in ("resident", "disk-none") else runs[:1]:
            found, emitted = bits(engine, method, ids, new_tokens)
            assert emitted == tokens
            assert torch.equal(found, logits)
    finally:
        swap_store(engine, before)
        opened.close()
    counters = opened.counters
    assert counters.demanded == counters.hit + counters.late + counters.missed
    assert counters.prefetched == counters.used + counters.wasted


@pytest.mark.parametrize("store", STORES)
def test_ar_has_the_same_bits_from_every_store(reference, store):
    engine, runs = reference
    opened = open_kind(engine, **STORES[store])
    before = swap_store(engine, opened)
    try:
        for ids, new_tokens, logits, tokens in runs:
            found, emitted = bits(engine, Method(), ids, new_tokens)
            assert emitted == tokens
            assert torch.equal(found, logits)
    finally:
        swap_store(engine, before)
        opened.close()


def test_drafts_are_accepted_and_rejected_in_these_tests(reference):
    """The grid means something only if blocks of many lengths stand."""
    engine, runs = reference
    ids, new_tokens, *_ = runs[1]
    steps, _ = decode_all(engine, ids, Method("top-r", r=3), Sampling(), max_new_tokens=new_tokens)
    accepted = {step.accepted for step in steps}
    assert len(accepted) >= 3, accepted
    assert len({token for step in steps for token in step.tokens}) > new_tokens // 3, "greedy decoding wanders"


def test_a_wider_block_has_its_own_bits_but_the_same_promise(tiny_folder):
    engine = make_engine(tiny_folder(dtype=torch.bfloat16), torch.bfloat16, block=16)
    ids = prompt(30)
    logits, tokens = bits(engine, Method(), ids, 30)
    for method in (Method("target", max_draft=15), Method("top-r", r=3, max_draft=12)):
        found, emitted = bits(engine, method, ids, 30)
        assert emitted == tokens
        assert torch.equal(found, logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_keeps_the_promise(tiny_folder, model_type, dtype):
    folder = tiny_folder(model_type=model_type, dtype=dtype)
    engine = make_engine(folder, dtype)
    ids = prompt(40)
    logits, tokens = bits(engine, Method(), ids, 24)
    for method in (Method("top-r", r=2), Method("draft-expert", max_draft=7), Method("target")):
        found, emitted = bits(engine, method, ids, 24)
        assert emitted == tokens
        assert torch.equal(found, logits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_ten_thousand_tokens(tiny_folder, dtype):
    engine = make_engine(tiny_folder(dtype=dtype), dtype)
    store = open_kind(engine, "disk", policy="lru", experts=24)
    before, count = swap_store(engine, store), 0
    methods = [replace(method, prefetch=True) for method in METHODS]
    try:
        for seed in range(60):
            ids = prompt(1 + 7 * seed % 150, seed=seed)
            logits, tokens = bits(engine, Method(), ids, 100)
            found, emitted = bits(engine, methods[seed % len(methods)], ids, 100)
            assert emitted == tokens
            assert torch.equal(found, logits)
            count += len(emitted)
    finally:
        swap_store(engine, before)
        store.close()
    assert count >= 5000, "for each of two types"
