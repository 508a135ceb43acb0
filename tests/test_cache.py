"""Cache policies and residency against brute-force models that sort and count everything anew at each step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.runtime.store.counters import PHASES, Phase, StoreCounters
from moexp.runtime.store.policies import POLICIES, LeastFrequent, make_policy
from moexp.runtime.store.residency import Residency

KEYS = [(layer, expert) for layer in (1, 2) for expert in range(4)]
DEMANDS = {key: (7 * place) % 5 for place, key in enumerate(KEYS[:6])}
some_keys = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)


def test_unknown_policy_lists_the_known():
    with pytest.raises(MoexpError, match="belady2.*none, lru, lfu, least-stale, static-hot"):
        make_policy("belady2")
    with pytest.raises(MoexpError, match="static-hot without a histogram"):
        make_policy("static-hot")


class Ranking:
    """What a policy should answer: the whole history, sorted when asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.history: list[tuple[str, tuple[int, int]]] = []

    def rank(self, key):
        touched = max(n for n, (_, other) in enumerate(self.history) if other == key)
        if self.name == "lfu":
            return sum(event == "demand" and other == key for event, other in self.history), touched
        if self.name == "static-hot":
            return DEMANDS.get(key, 0), key
        return self.staleness(key, touched) if self.name == "least-stale" else touched

    def staleness(self, key, touched):
        number, layer, last = 0, -1, {}
        demanded: set[tuple[int, int]] = set()
        for event, other in self.history:
            if event == "demand":
                if other[0] < layer or other in demanded:
                    number, demanded = number + 1, set()
                layer = other[0]
                demanded.add(other)
            last[other] = number
        ahead = key[0] > layer
        return last[key] == number, ahead, last[key], -key[0] if ahead else key[0], touched

    def victim(self, keys):
        return min(keys, key=self.rank, default=None)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(data=st.data())
def test_victims(name, data):
    policy, ranking, present = make_policy(name, DEMANDS), Ranking(name), set()
    for _ in range(data.draw(st.integers(1, 60))):
        key = data.draw(st.sampled_from(KEYS))
        action = data.draw(st.sampled_from(["touch", "touch", "drop", "victim"]))
        if action == "touch":
            event = "demand" if key in present else "insert"
            getattr(policy, f"on_{event}")(key)
            ranking.history.append((event, key))
            present.add(key)
        elif action == "drop" and key in present:
            policy.on_drop(key)
            present.remove(key)
        allowed = set(data.draw(some_keys))
        assert policy.victim(allowed.__contains__) == ranking.victim(present & allowed)


def test_least_frequent_forgets_no_count_and_does_not_grow():
    policy = LeastFrequent()
    popular, other = KEYS[:2]
    policy.on_insert(other)
    policy.on_demand(other)
    for _ in range(1000):
        policy.on_insert(popular)
        policy.on_demand(popular)
        policy.on_drop(popular)
    policy.on_insert(popular)
    assert policy.victim(lambda key: True) == other
    assert len(policy._by_count) < 100


@dataclass
class Stay:
    """One expert in the model."""

    origin: Phase | None
    cycle: int
    unused: bool
    begun: bool = False
    ready: bool = False
    pins: int = 0
    leaves: bool = False


class Model:
    """Residency in the plainest terms."""

    def __init__(self, policy: str, capacity: int | None) -> None:
        self.keeps, self.capacity, self.ranking = policy != "none", capacity, Ranking(policy)
        self.stays: dict[tuple[int, int], Stay] = {}
        self.cycle = 0
        self.counts = StoreCounters()

    def drop(self, key):
        self.counts.wasted += self.stays.pop(key).unused

    def cancel(self, layers):
        for key, stay in list(self.stays.items()):
            if stay.unused and not stay.begun and key[0] in layers:
                self.counts.cancelled += 1
                self.drop(key)

    def evict(self, urgent) -> bool:
        idle = {key: stay for key, stay in self.stays.items() if stay.ready and not stay.pins}
        old = [key for key, stay in idle.items() if stay.cycle < self.cycle]
        spent = [key for key, stay in idle.items() if not stay.unused]
        for group in (old, spent, list(idle)) if urgent else (old,):
            if group:
                self.counts.evicted += 1
                self.drop(self.ranking.victim(group))
                return True
        return False

    def shrink(self):
        while self.capacity is not None and len(self.stays) > self.capacity and self.evict(True):
            pass

    def full(self) -> bool:
        return self.capacity is not None and len(self.stays) >= self.capacity

    def insert(self, key, origin):
        self.stays[key] = Stay(origin, self.cycle, origin is None)
        self.ranking.history.append(("insert", key))

    def begin_cycle(self):
        self.cancel({key[0] for key in KEYS})
        self.cycle += 1
        for key, stay in list(self.stays.items()):
            if not self.keeps and stay.pins:
                stay.leaves = True
            elif not self.keeps and stay.ready:
                self.drop(key)

    def prefetch(self, keys) -> list:
        absent = [key for key in keys if key not in self.stays]
        for key in set(keys) - set(absent):
            self.stays[key].cycle, self.stays[key].leaves = self.cycle, False
        launched = []
        for key in absent:
            if not self.full() or self.evict(False):
                self.insert(key, None)
                launched.append(key)
        self.counts.prefetched += len(launched)
        return launched

    def demand(self, keys, phase) -> tuple[list, list]:
        present = [key for key in keys if key in self.stays]
        late = [key for key in present if not self.stays[key].ready]
        absent = [key for key in keys if key not in self.stays]
        for key in present:
            stay = self.stays[key]
            self.counts.used += stay.unused
            stay.unused, stay.cycle, stay.leaves = False, self.cycle, False
            stay.pins += 1
            self.ranking.history.append(("demand", key))
        if phase != "draft":
            self.cancel({layer for layer, _ in keys})
        for key in absent:
            if self.full():
                self.evict(True)
            self.insert(key, phase)
            self.stays[key].pins = 1
            self.ranking.history.append(("demand", key))
        for counts in (self.counts, self.counts.phases[phase]):
            counts.demanded += len(keys)
            counts.late += len(late)
            counts.missed += len(absent)
            counts.hit += len(present) - len(late)
        return absent, late

    def land(self, key, size):
        stay = self.stays[key]
        stay.ready = True
        self.counts.read_bytes += size
        if stay.origin is None:
            self.counts.prefetch_bytes += size
        else:
            self.counts.demand_bytes += size
            self.counts.phases[stay.origin].demand_bytes += size
        if stay.leaves and not stay.pins:
            self.drop(key)
        self.shrink()

    def release(self, stays, phase):
        for key, stay in stays.items():
            stay.pins -= 1
            stay.leaves = stay.leaves or (not self.keeps and phase != "draft")
            there = key in self.stays and self.stays[key] is stay
            if there and stay.leaves and stay.ready and not stay.pins:
                self.drop(key)
        self.shrink()


def unstarted(policy, capacity, counters) -> Residency[str]:
    """A residency whose transfers cannot be cancelled."""
    return Residency(policy, capacity, counters, lambda entry: None, lambda entry: False)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
def test_residency(policy, data):
    """Random calls: after each, the same experts are there in the same state, and every counter is the same."""
    capacity = data.draw(st.sampled_from([None, 1, 3, 5]))
    model = Model(policy, capacity)
    counters = StoreCounters()
    residency: Residency[str] = Residency(
        make_policy(policy, DEMANDS), capacity, counters, lambda entry: None, lambda entry: entry.transfer != "begun"
    )
    tickets: list = []
    for _ in range(data.draw(st.integers(1, 40))):
        coming = [key for key, stay in model.stays.items() if not stay.ready]
        actions = ["cycle", "prefetch", "demand", "demand"]
        actions += ["begin", "land", "land", "fail"] * bool(coming) + ["release"] * bool(tickets)
        action = data.draw(st.sampled_from(actions))
        if action == "cycle":
            residency.begin_cycle()
            model.begin_cycle()
        elif action == "prefetch":
            keys = data.draw(some_keys)
            assert [entry.key for entry in residency.prefetch(keys)] == model.prefetch(keys)
        elif action == "demand":
            keys, phase = data.draw(some_keys), data.draw(st.sampled_from(PHASES))
            entries, missing, late = residency.demand(keys, phase)
            assert ([e.key for e in missing], [e.key for e in late]) == model.demand(keys, phase)
            assert [entry.key for entry in entries] == keys
            tickets.append((entries, {key: model.stays[key] for key in keys}, phase))
        elif action == "release":
            entries, stays, phase = tickets.pop(data.draw(st.integers(0, len(tickets) - 1)))
            residency.release(entries, phase)
            model.release(stays, phase)
        else:
            key = data.draw(st.sampled_from(coming))
            residency.entries[key].transfer = "begun"
            model.stays[key].begun = True
            if action == "land":
                size = data.draw(st.integers(1, 9))
                residency.landed(residency.entries[key], size)
                model.land(key, size)
            elif action == "fail":
                residency.failed(residency.entries[key])
                model.drop(key)
        state = {key: (e.ready, e.pins, e.unused) for key, e in residency.entries.items()}
        assert state == {key: (stay.ready, stay.pins, stay.unused) for key, stay in model.stays.items()}
        assert counters == model.counts
        outstanding = sum(stay.unused for stay in model.stays.values())
        assert counters.demanded == counters.hit + counters.late + counters.missed
        assert counters.prefetched == counters.used + counters.wasted + outstanding
        if capacity is not None:
            held = sum(bool(stay.pins) or not stay.ready for stay in model.stays.values())
            assert len(model.stays) <= max(capacity, held)
    residency.cancel_all()
    residency.clear()
    assert counters.prefetched == counters.used + counters.wasted
    assert not residency.entries


def test_a_cycle_keeps_what_came_in_until_it_is_verified():
    """Policy none: the drafter's experts are hits for verification, and nothing outlives the cycle."""
    counters = StoreCounters()
    residency = unstarted(make_policy("none"), None, counters)

    def visit(keys, phase):
        entries, missing, _ = residency.demand(keys, phase)
        for entry in missing:
            residency.landed(entry, 1)
        residency.release(entries, phase)
        return [entry.key for entry in missing]

    residency.begin_cycle()
    assert visit([(1, 0)], "draft") == [(1, 0)]
    assert visit([(1, 0)], "draft") == []
    assert visit([(1, 0), (1, 1)], "verify") == [(1, 1)]
    assert not residency.entries
    assert visit([(1, 3)], "draft") == [(1, 3)]
    residency.begin_cycle()
    assert not residency.entries


def test_prefetch_gives_up_nothing_of_its_own_cycle():
    counters = StoreCounters()
    residency = unstarted(make_policy("lru"), 2, counters)
    residency.begin_cycle()
    for entry in residency.prefetch([(1, 0), (1, 1), (1, 2)]):
        residency.landed(entry, 1)
    assert sorted(residency.entries) == [(1, 0), (1, 1)] and counters.prefetched == 2
    residency.begin_cycle()
    residency.prefetch([(1, 1)])  # predicted again, so it stays
    assert [entry.key for entry in residency.prefetch([(1, 3), (1, 2)])] == [(1, 3)]
    assert sorted(residency.entries) == [(1, 1), (1, 3)] and counters.wasted == 1


def test_a_failed_demand_leaves_no_trace_in_the_cycle():
    residency: Residency[str] = Residency(
        make_policy("lru"), 2, StoreCounters(), lambda entry: None, lambda entry: False
    )
    old, _, _ = residency.demand([(1, 0)], "draft")
    residency.landed(old[0], 1)
    residency.release(old, "draft")
    residency.begin_cycle()
    broken, _, _ = residency.demand([(1, 1)], "draft")
    residency.failed(broken[0])
    residency.release(broken, "draft")
    assert len(residency.prefetch([(1, 2), (1, 3)])) == 2, "the expert of the last cycle makes room"


def test_a_demand_gives_up_predicted_experts_last():
    """Of what this cycle brought in, first goes what has been used."""
    residency: Residency[str] = Residency(
        make_policy("lru"), 2, StoreCounters(), lambda entry: None, lambda entry: False
    )
    residency.begin_cycle()
    [predicted] = residency.prefetch([(2, 0)])
    residency.landed(predicted, 1)
    for expert in range(3):
        [entry], _, _ = residency.demand([(1, expert)], "draft")
        residency.landed(entry, 1)
        residency.release([entry], "draft")
    assert sorted(residency.entries) == [(1, 2), (2, 0)]
    pinned, _, _ = residency.demand([(1, 2)], "draft")
    residency.demand([(1, 3)], "draft")  # nothing else is left
    assert sorted(residency.entries) == [(1, 2), (1, 3)]


def test_counters_subtract_and_flatten():
    before = StoreCounters(demanded=3, hit=2, missed=1)
    before.phases["ar"].demanded = 3
    after = before.snapshot()
    after.demanded += 2
    after.phases["draft"].demanded += 2
    after.phases["draft"].stall_s += 0.5
    delta = after - before
    assert (delta.demanded, delta.hit, delta.phases["ar"].demanded) == (2, 0, 0)
    assert before.phases["draft"].demanded == 0, "a snapshot shares nothing"
    flat = delta.as_dict()
    assert flat["demanded"] == 2 and flat["draft_stall_s"] == 0.5
    assert not any(name.startswith("ar_") for name in flat)
