"""The virtual store against the real one, both over the same virtual link; and the simulator's speed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp.runtime.store.policies import POLICIES, make_policy
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.cycles import Cycle, key_table, routed_step
from moexp.sim.machine.link import LinkModel
from moexp.sim.machine.machine import MachineModel
from moexp.sim.machine.run import simulate
from moexp.sim.machine.store import VirtualStore
from tests.sim_cases import links
from tests.test_store import EXPERT_BYTES, KEYS, MarkedSource, marked_store
from tests.transports import LinkTransport

keys_of = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(data=st.data())
def test_the_virtual_store_counts_as_the_real_one(policy, data):
    capacity, model = data.draw(st.sampled_from([None, 2, 5])), data.draw(links)
    source = MarkedSource()
    transport = LinkTransport(source, model, EXPERT_BYTES)
    real = marked_store(policy, capacity, source, transport=transport)
    virtual = VirtualStore(make_policy(policy, {}), capacity, model, EXPERT_BYTES)
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.0, 0.01, 0.1, 2.0]))
        transport.link.advance(now_s)
        action = data.draw(st.sampled_from(["cycle", "prefetch", "request", "request"]))
        keys = data.draw(keys_of)
        if action == "cycle":
            real.begin_cycle()
            virtual.begin_cycle(now_s)
        elif action == "prefetch":
            assert real.prefetch(keys) == virtual.prefetch(keys, now_s)
        else:
            phase = data.draw(st.sampled_from(["draft", "verify", "ar", "prefill"]))
            ticket, mine = real.request(keys, phase), virtual.request(keys, phase, now_s)
            assert len(list(real.arrivals(ticket))) == len(keys)
            while mine.left:
                mine.ready = 0
                now_s = virtual.wait(mine, now_s)
            assert now_s == transport.link.now_s
            real.release(ticket)
            virtual.release(mine)
        assert timeless(real.counters) == timeless(virtual.counters)
    real.close()
    virtual.close(now_s)
    assert timeless(real.counters) == timeless(virtual.counters)


def timeless(counters):
    return {name: value for name, value in counters.as_dict().items() if not name.endswith("stall_s")}


@pytest.mark.slow
@pytest.mark.parametrize("cache, capacity, prefetch", [("none", None, False), ("none", None, True), ("lru", 800, True)])
def test_speed(cache, capacity, prefetch):
    """At least 100,000 token-layers a second on one core, best of five."""
    layers, experts, top_k, drafts = 29, 64, 6, 4
    rng, table = np.random.default_rng(0), key_table(range(layers), experts)
    popular_L1E = rng.gumbel(size=(layers, 1, experts))
    cycles = []
    for _ in range(60):
        shared_L1E = popular_L1E + rng.gumbel(size=(layers, 1, experts))
        rows_LBk = (shared_L1E + rng.gumbel(size=(layers, drafts + 1, experts))).argsort(-1)[:, :, -top_k:]
        steps = [
            routed_step(table, rows_LBk[:, at : at + 1], "draft", top_r=1, prefetch=prefetch) for at in range(drafts)
        ]
        cycles.append(Cycle([*steps, routed_step(table, rows_LBk, "verify")], 3))
    compute = ComputeCosts(fixed_s=1e-3, attention_s=2e-4, shared_s=1e-4, expert_s=3e-5, block_rows=8)
    model = MachineModel(LinkModel(2e9, 8e8, 5e-5, 8, 2), compute, 400_000, capacity)
    best_s = float("inf")
    for _ in range(5):
        begin_s = time.process_time()
        simulate(cycles, model, cache)
        best_s = min(best_s, time.process_time() - begin_s)
    token_layers = sum(step.rows * len(step.demands) for cycle in cycles for step in cycle.steps())
    assert token_layers / best_s > 100_000
