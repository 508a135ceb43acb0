"""The simulator's link, store and machine: hand-made timelines, and laws that no setting may break."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.runtime.store.policies import POLICIES, make_policy
from moexp.sim.machine.cold import ColdLayers
from moexp.sim.machine.cycles import Cycle, Step
from moexp.sim.machine.link import Flight, LinkModel, VirtualLink
from moexp.sim.machine.machine import Machine, open_machine
from moexp.sim.machine.policies import CACHES
from moexp.sim.machine.run import simulate
from moexp.sim.machine.store import VirtualStore
from tests.sim_cases import BYTES, ar_cycles, costs, demand_step, links, machine, spec_cycles

few = settings(max_examples=40)


def flights(*layers: int) -> list[Flight]:
    return [Flight(f"{layer}-{number}", layer) for number, layer in enumerate(layers)]


def landings(link: VirtualLink) -> list[tuple[float, str]]:
    found = []
    while link.next_s < float("inf"):
        link.wait()
        found += [(round(link.now_s, 6), flight.owner) for flight in link.landed]
        link.landed.clear()
    return found


def test_a_burst_shares_the_bandwidth():
    link = VirtualLink(LinkModel(bandwidth_bytes_s=1000, alone_bytes_s=500, latency_s=0.1, concurrency=3), 1000)
    link.start(flights(1, 1, 1, 1), urgent=True)
    # a third of the bandwidth each: 3 s for all; the fourth begins then, and alone it gets at most 500 bytes/s
    assert landings(link) == [(3.1, "1-0"), (3.1, "1-1"), (3.1, "1-2"), (5.2, "1-3")]


def test_a_link_that_is_priced_anew_keeps_what_has_come():
    link = VirtualLink(LinkModel(bandwidth_bytes_s=1000, concurrency=2), 1000)
    link.start(flights(1), urgent=True)
    link.advance(0.5)
    link.reprice(LinkModel(bandwidth_bytes_s=250, concurrency=2))
    assert landings(link) == [(2.5, "1-0")]


def test_demands_go_first_and_prefetches_by_layer_leave_room():
    link = VirtualLink(LinkModel(bandwidth_bytes_s=1000, concurrency=2, background=1), 1000)
    early, late = flights(5, 3, 4), flights(9)
    link.start(early, urgent=False)  # layer 3 begins: by layer, though it came second
    link.advance(0.5)
    link.start(late, urgent=True)  # takes the server that prefetches may not have
    assert link.cancel(early[2]) and not link.cancel(early[1])
    # the prefetch's second half takes 1 s beside the demand; then layer 5 begins beside it; layer 4 was cancelled
    assert landings(link) == [(1.5, "3-1"), (2.5, "9-0"), (3.0, "5-0")]


def test_a_promoted_prefetch_is_a_demand():
    link = VirtualLink(LinkModel(bandwidth_bytes_s=1000, concurrency=1), 1000)
    queued = flights(1, 2, 3)
    link.start(queued, urgent=False)
    link.promote([queued[2], queued[0]])  # the first has begun: nothing changes for it
    assert landings(link) == [(1.0, "1-0"), (2.0, "3-2"), (3.0, "2-1")]


def test_a_serial_link_is_the_pacers():
    link = VirtualLink(LinkModel(bandwidth_bytes_s=1000, latency_s=0.5, concurrency=2, serial=True), 1000)
    link.start(flights(1, 1, 1), urgent=True)
    # latencies overlap on the link's first two; the third starts at 1.5 and its latency passes while the second runs
    assert landings(link) == [(1.5, "1-0"), (2.5, "1-1"), (3.5, "1-2")]


def test_a_link_that_cannot_be_is_refused():
    with pytest.raises(MoexpError, match="link"):
        LinkModel(0.0)


def two_layers() -> Step:
    """Three experts over two layers: two of the first, one of the second."""
    return demand_step("ar", [[(1, 0), (1, 1)], [(2, 0)]])


def test_a_timeline_by_hand():
    """One expert takes 1 s alone, two at once 2 s. before 0.5, then a layer: lead 0.25, resident 0.5, expert
    0.125."""
    model = machine(LinkModel(bandwidth_bytes_s=BYTES), fixed_s=0.5, attention_s=0.25, shared_s=0.5, expert_s=0.125)
    run = Machine(model, make_policy("none"))
    [took] = run.run_timed([Cycle([two_layers()], 1)])
    # layer 1: demand at 0.75; resident until 1.25; both in at 2.75, computed 2.875 and 3
    # layer 2: demand at 3.25; resident until 3.75; in at 4.25, computed 4.375
    assert took.cycle_s == pytest.approx(4.375)
    assert run.counters.stall_s == pytest.approx((2.75 - 1.25) + (4.25 - 3.75))
    assert run.compute_s == pytest.approx(0.5 + 2 * 0.75 + 3 * 0.125)
    assert run.counters.missed == 3 and run.counters.read_bytes == 3 * BYTES


def test_a_prefetch_hides_a_layer():
    """Announced by the first layer, the second one's expert comes in behind the demand."""
    model = machine(LinkModel(bandwidth_bytes_s=BYTES, concurrency=1), attention_s=0.25, shared_s=2.0)
    draft = demand_step("draft", [[(1, 0)], [(2, 0)]], beyond=[[(2, 0)], []])
    run = Machine(model, make_policy("none"))
    [took] = run.run_timed([Cycle([draft], 0)])
    # layer 1: demand at 0.25, in at 1.25; the prefetch follows, in at 2.25, just as the resident part ends
    assert took.cycle_s == pytest.approx(2 * 2.25)
    assert (run.counters.hit, run.counters.missed, run.counters.used, run.counters.stall_s) == (1, 1, 1, 0.0)


@few
@given(links, costs, st.integers(0, 99), st.booleans())
def test_the_cold_shortcut_is_the_full_walk(link, compute, seed, speculate):
    cycles = spec_cycles(seed, 3) if speculate else ar_cycles(seed, 4)
    model = machine(link)
    model = type(model)(link, compute, BYTES)
    quick, full = open_machine(model, make_policy("none"), cycles), Machine(model, make_policy("none"))
    assert isinstance(quick._store, ColdLayers)
    for fast, slow in zip(quick.run_timed(cycles), full.run_timed(cycles), strict=True):
        assert fast.draft_s == pytest.approx(slow.draft_s) and fast.cycle_s == pytest.approx(slow.cycle_s)
        mine, other = fast.store.as_dict(), slow.store.as_dict()
        assert {name: value for name, value in mine.items() if not name.endswith("_s")} == {
            name: value for name, value in other.items() if not name.endswith("_s")
        }
        assert fast.store.stall_s == pytest.approx(slow.store.stall_s, abs=1e-9)
    assert quick.compute_s == pytest.approx(full.compute_s)


@few
@given(links, costs, st.integers(0, 99), st.sampled_from(CACHES), st.sampled_from([None, 4, 12]), st.booleans())
def test_time_is_at_least_what_the_link_and_computing_need(link, compute, seed, cache, capacity, prefetch):
    cycles = spec_cycles(seed, 4, prefetch=prefetch)
    model = type(machine())(link, compute, BYTES, capacity)
    found = simulate(cycles, model, cache, demands={})
    landed_by_the_end = found.counters.read_bytes - (found.counters.prefetch_bytes if prefetch else 0)
    assert found.seconds >= landed_by_the_end / link.bandwidth_bytes_s * (1 - 1e-9)
    assert found.seconds >= found.compute_s * (1 - 1e-9)
    assert found.seconds == pytest.approx(found.compute_s + found.counters.stall_s)
    counters = found.counters
    assert counters.demanded == counters.hit + counters.late + counters.missed
    assert counters.prefetched == counters.used + counters.wasted
    assert counters.read_bytes == BYTES * (counters.missed + counters.prefetched - counters.cancelled)


@few
@given(links, st.integers(0, 99), st.floats(1, 50))
def test_more_bandwidth_never_slows_a_cold_run(link, seed, times):
    faster = LinkModel(
        link.bandwidth_bytes_s * times,
        None if link.alone_bytes_s is None else link.alone_bytes_s * times,
        link.latency_s,
        link.concurrency,
        link.background,
        link.serial,
    )
    cycles = ar_cycles(seed, 3)
    slow = simulate(cycles, machine(link, shared_s=0.01, expert_s=0.002))
    assert simulate(cycles, machine(faster, shared_s=0.01, expert_s=0.002)).seconds <= slow.seconds * (1 + 1e-12)


@few
@given(st.sampled_from(["lru", "lfu", "least-stale", "static-hot"]), st.integers(0, 99), st.integers(3, 20))
def test_nothing_misses_less_than_belady(cache, seed, capacity):
    for cycles in (ar_cycles(seed, 20), spec_cycles(seed, 10)):
        model = machine(LinkModel(1e9, concurrency=1), capacity)
        bound, other = simulate(cycles, model, "belady"), simulate(cycles, model, cache, demands={})
        assert bound.counters.demanded == other.counters.demanded
        assert bound.counters.missed <= other.counters.missed


@few
@given(st.sampled_from(sorted(POLICIES)), links, st.integers(0, 99), st.integers(1, 12), st.booleans())
def test_policies_respect_the_capacity(cache, link, seed, capacity, prefetch):
    run = Machine(machine(link, capacity), make_policy(cache, {}))
    assert isinstance(run._store, VirtualStore)
    for cycle in spec_cycles(seed, 5, prefetch=prefetch):
        run.run([cycle])
        entries = run._store._residency.entries
        coming = sum(not entry.ready for entry in entries.values())
        assert len(entries) <= max(capacity, coming)


def test_the_simulator_needs_no_torch():
    """Sweeps start many processes. What measures a machine does import it."""
    code = "import sys, importlib, moexp.cli.simulate\n"
    names = ["platforms.simulated", "studies.sweep", "validation.validate", "routing.sources", "machine.run"]
    code += f"for name in {names}: importlib.import_module('moexp.sim.' + name)\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
