"""Expert stores: what they yield, what they count, and that faults end in an error and never in a hang."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import threading
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.runtime.store import disk as dio
from moexp.runtime.store.bandwidth import probe_bandwidth
from moexp.runtime.store.counters import PHASES, Phase
from moexp.runtime.store.disk import DiskFile, FileSource, open_shards
from moexp.runtime.store.opening import STORE_KINDS, open_store
from moexp.runtime.store.pacing import Pacer
from moexp.runtime.store.policies import POLICIES, make_policy
from moexp.runtime.store.slot_store import SlotStore
from moexp.runtime.store.slots import PAGE, Slots
from moexp.runtime.store.transfer import Plan, StoreOptions, Transfer, TransferPool
from moexp.target.experts import ExpertIndex
from tests.expert_files import APART, expected, expert_tensors, save_in_order, save_shards
from tests.transports import FakeClock, HandTransport

WIDTH, HIDDEN = 3, 5
EXPERT_BYTES = 3 * WIDTH * HIDDEN * 4
KEYS = [(layer, expert) for layer in (1, 2) for expert in range(4)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)


def value(key) -> float:
    return 10.0 * key[0] + key[1]


class MarkedSource:
    """Experts whose every weight is `value(key)`; a test may hold them back, see them begin, or make them fail."""

    slot_bytes = EXPERT_BYTES

    def __init__(self, pieces: int = 1) -> None:
        self.pieces = tuple(range(pieces))
        self.begun: SimpleQueue[tuple[int, int]] = SimpleQueue()  # a key for every piece that has begun
        self.moved: list[tuple[tuple[int, int], int]] = []
        self.failing: set[tuple[int, int]] = set()
        self.passing: set[tuple[int, int]] = set()  # not held back by the gate
        self.gate = threading.Event()
        self.gate.set()
        self.closed = 0

    def plan(self, key) -> Plan:
        return Plan(self.pieces, EXPERT_BYTES, WIDTH, HIDDEN, 0, 2 * WIDTH * HIDDEN)

    def move(self, transfer, piece) -> None:
        self.begun.put(transfer.key)
        if transfer.key not in self.passing:
            self.gate.wait()
        self.moved.append((transfer.key, piece))
        if transfer.key in self.failing:
            raise OSError(errno.EIO, "Input/output error")

    def wait_begun(self, pieces: int = 1) -> None:
        """Until so many more pieces have begun: they can be neither overtaken nor cancelled."""
        for _ in range(pieces):
            self.begun.get()

    def finish(self, transfer) -> None:
        count = EXPERT_BYTES // 4
        transfer.slot.elements[transfer.slot.first : transfer.slot.first + count] = value(transfer.key)

    def close(self) -> None:
        self.closed += 1


def open_gate_once_closing(source: MarkedSource, pool: TransferPool) -> None:
    """What has begun is held back until the pool has forgotten all that has not."""

    def wait() -> None:
        pool._closing.wait()
        source.gate.set()

    threading.Thread(target=wait, daemon=True).start()


def pool_of(store: SlotStore) -> TransferPool:
    assert isinstance(store._transport, TransferPool)
    return store._transport


def marked_store(policy="none", capacity=None, source=None, transport=None, **options) -> SlotStore:
    return SlotStore(
        source or MarkedSource(),
        make_policy(policy, {}),
        dtype=torch.float32,
        expert_bytes=EXPERT_BYTES,
        budget_bytes=None if capacity is None else capacity * EXPERT_BYTES,
        options=StoreOptions(poison=True, **options),
        transport=transport,
    )


def assert_content(key, weights) -> None:
    assert weights.gate_up.shape == (2 * WIDTH, HIDDEN) and weights.down.shape == (HIDDEN, WIDTH)
    for tensor in (weights.gate_up, weights.down):
        assert torch.equal(tensor, torch.full_like(tensor, value(key))), "overwritten, freed or not yet there"


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
def test_random_calls(policy, data):
    """With freed slots poisoned: every weight handed out is right until its release, nothing is read twice while it is
    there or coming, every expert of a ticket comes exactly once, and the counts of launches and bytes are exact."""
    capacity = data.draw(st.sampled_from([None, 1, 3, 5]))
    source = MarkedSource()
    transport = HandTransport(source, data.draw(st.integers(0, 99)))
    store = marked_store(policy, capacity, source, transport=transport)
    open_tickets: list = []  # (ticket, generator, {key: weights} seen)
    demanded = 0
    for _ in range(data.draw(st.integers(1, 40))):
        actions = ["cycle", "prefetch", "request", "request"]
        actions += ["begin", "land", "land"] * bool(transport.coming) + ["pull", "pull", "release"] * bool(open_tickets)
        action = data.draw(st.sampled_from(actions))
        if action == "cycle":
            store.begin_cycle()
        elif action == "prefetch":
            before = len(transport.started)
            assert store.prefetch(data.draw(some_keys)) == len(transport.started) - before
        elif action == "request":
            keys = data.draw(some_keys)
            demanded += len(keys)
            ticket = store.request(keys, data.draw(st.sampled_from(PHASES)))
            open_tickets.append((ticket, store.arrivals(ticket), {}))
        elif action in ("begin", "land"):
            getattr(transport, action)(data.draw(st.sampled_from(transport.coming)))
        else:
            ticket, arrivals, seen = data.draw(st.sampled_from(open_tickets))
            if action == "pull":
                for key, weights in arrivals:
                    assert key in ticket.keys and key not in seen
                    seen[key] = weights
                    if data.draw(st.booleans()):
                        break
                else:
                    assert set(seen) == set(ticket.keys)
            else:
                store.release(ticket)
                store.release(ticket)
                open_tickets = [held for held in open_tickets if held[0] is not ticket]
        for _, _, seen in open_tickets:
            for key, weights in seen.items():
                assert_content(key, weights)
    store.close()
    counters = store.counters
    assert counters.demanded == demanded == counters.hit + counters.late + counters.missed
    assert counters.missed + counters.prefetched == len(transport.started)
    assert counters.prefetched == counters.used + counters.wasted
    assert counters.read_bytes == counters.demand_bytes + counters.prefetch_bytes
    assert counters.prefetch_bytes <= EXPERT_BYTES * (counters.prefetched - counters.cancelled)
    assert source.closed == 1


def test_present_experts_come_first_and_late_ones_as_they_land():
    source = MarkedSource()
    transport = HandTransport(source, 0)
    store = marked_store(source=source, transport=transport)
    store.prefetch([(1, 1), (1, 2)])
    transport.land(transport.coming[1])
    ticket = store.request([(1, 0), (1, 1), (1, 2)], "verify")
    arrivals = store.arrivals(ticket)
    assert next(arrivals)[0] == (1, 2)
    transport.land(transport.coming[1])
    transport.land(transport.coming[0])
    assert [key for key, _ in arrivals] == [(1, 0), (1, 1)]
    counters = store.counters
    assert (counters.hit, counters.late, counters.missed, counters.used) == (1, 1, 1, 2)
    assert counters.stall_s == 0, "nothing was waited for"
    assert transport.started == [(1, 1), (1, 2), (1, 0)]
    store.close()


def test_bytes_belong_to_whoever_launched_the_read():
    with marked_store() as store:
        store.prefetch([(1, 0)])
        phases: dict[Phase, int] = {"draft": 2, "verify": 3}
        for phase, count in phases.items():
            keys = [(1, expert) for expert in range(count)]
            ticket = store.request(keys, phase)
            assert len(list(store.arrivals(ticket))) == len(keys)
            store.release(ticket)
        counters = store.counters
        assert counters.prefetch_bytes == EXPERT_BYTES and counters.demand_bytes == 2 * EXPERT_BYTES
        assert counters.phases["draft"].demand_bytes == counters.phases["verify"].demand_bytes == EXPERT_BYTES
        assert (counters.phases["verify"].hit, counters.phases["verify"].missed) == (2, 1)


# --- the thread pool


def test_demand_overtakes_queued_prefetches():
    source = MarkedSource(pieces=2)
    source.gate.clear()
    store = marked_store(source=source, io_threads=1)
    store.prefetch([(1, 0), (1, 1), (1, 2)])
    source.wait_begun()
    ticket = store.request([(1, 3), (1, 2)], "draft")
    source.gate.set()
    assert {key for key, _ in store.arrivals(ticket)} == {(1, 3), (1, 2)}
    store.close()
    assert source.moved[0] == ((1, 0), 0)
    assert source.moved[1:5] == [((1, 3), 0), ((1, 3), 1), ((1, 2), 0), ((1, 2), 1)]
    assert len(set(source.moved)) == len(source.moved), "a piece was moved twice"
    assert store.counters.late == 1 and store.counters.missed == 1


def test_prefetches_are_served_from_the_first_layer_on():
    source = MarkedSource()
    source.gate.clear()
    store = marked_store(source=source, io_threads=1)
    store.prefetch([(9, 9)])
    source.wait_begun()
    keys = [(layer, expert) for expert in range(2) for layer in (1, 2, 3)]
    store.prefetch(keys)
    source.gate.set()
    source.wait_begun(len(keys))
    store.close()  # waits for what has begun
    assert [key for key, _ in source.moved[1:]] == sorted(keys)


def test_verification_cancels_what_it_did_not_demand():
    source = MarkedSource()
    source.gate.clear()
    store = marked_store(source=source, io_threads=1)
    store.prefetch([(1, 0), (1, 1), (1, 2), (2, 0)])
    source.wait_begun()
    draft = store.request([(1, 3)], "draft")
    assert store.counters.cancelled == 0, "drafting runs ahead of the layers it prefetches for"
    ticket = store.request([(1, 1)], "verify")
    assert store.counters.cancelled == store.counters.wasted == 1  # (1, 2); (1, 0) has begun, (2, 0) is another layer's
    source.gate.set()
    list(store.arrivals(ticket)), list(store.arrivals(draft))
    store.close()
    assert {key for key, _ in source.moved} <= {(1, 0), (1, 1), (1, 3), (2, 0)}
    assert store.counters.wasted == 3 and store.counters.used == 1


def test_background_threads_leave_room_for_demands():
    source = MarkedSource()
    source.gate.clear()
    source.passing = {(2, 0)}
    store = marked_store(source=source, io_threads=3, prefetch_threads=2)
    store.prefetch([(1, expert) for expert in range(9)])
    source.wait_begun(2)
    assert len(list(store.arrivals(store.request([(2, 0)], "draft")))) == 1, "with both prefetches still under way"
    assert pool_of(store)._background_now == 2 and len(pool_of(store)._queued) == 7
    source.gate.set()
    source.wait_begun(1 + 7)
    store.close()
    assert store.counters.prefetch_bytes == 9 * EXPERT_BYTES


def test_stall_is_the_time_spent_waiting():
    source, clock = MarkedSource(), FakeClock()

    class Slow(HandTransport):
        def land(self, transfer) -> None:
            clock.time_s += 0.25
            super().land(transfer)

    store = marked_store(source=source, transport=Slow(source, 0), clock=clock)
    list(store.arrivals(store.request([(1, 0), (1, 1)], "ar")))
    assert store.counters.stall_s == store.counters.phases["ar"].stall_s == 0.5
    list(store.arrivals(store.request([(1, 0)], "ar")))
    clock.time_s += 1
    assert store.counters.stall_s == 0.5, "what is in memory is not waited for"
    store.close()


def test_many_threads_and_pieces_with_poison():
    """The real pool under load: contents right, nothing twice, all threads gone at the end."""
    rng = random.Random(1)
    source = MarkedSource(pieces=3)
    with marked_store("lru", 12, source, io_threads=4) as store:
        for _ in range(60):
            store.begin_cycle()
            store.prefetch([(layer, rng.randrange(8)) for layer in (1, 2, 3)])
            for layer in (1, 2, 3):
                ticket = store.request([(layer, expert) for expert in rng.sample(range(8), 3)], "verify")
                for key, weights in store.arrivals(ticket):
                    assert_content(key, weights)
                store.release(ticket)
        assert store._slots.allocated > 0
    counters = store.counters
    assert counters.demanded == 540 and counters.prefetched == counters.used + counters.wasted
    assert len(source.moved) == 3 * (counters.missed + counters.prefetched - counters.cancelled)
    assert not any(thread.is_alive() for thread in pool_of(store)._threads)


# --- faults


def test_a_failed_read_is_raised_where_it_is_waited_for_and_tried_again_later():
    source = MarkedSource(pieces=2)
    source.failing = {(1, 1)}
    with marked_store(source=source) as store:
        ticket = store.request([(1, 0), (1, 1), (1, 2)], "ar")
        arrived = []
        with pytest.raises(MoexpError, match="expert 1 of layer 1.*Input/output error"):
            for key, weights in store.arrivals(ticket):
                assert_content(key, weights)
                arrived.append(key)
        arrived += [key for key, _ in store.arrivals(ticket)]
        assert sorted(arrived) == [(1, 0), (1, 2)], "the others come all the same"
        store.release(ticket)
        source.failing.clear()
        [(key, weights)] = store.arrivals(store.request([(1, 1)], "ar"))
        assert_content(key, weights)


def test_a_failed_prefetch_is_wasted_and_read_again_on_demand():
    source = MarkedSource()
    source.failing = {(1, 1)}
    transport = HandTransport(source, 0)
    with marked_store(source=source, transport=transport) as store:
        store.prefetch([(1, 1)])
        transport.land(transport.coming[0])
        source.failing.clear()
        assert len(list(store.arrivals(store.request([(1, 1)], "verify")))) == 1
        assert (store.counters.wasted, store.counters.missed, store.counters.used) == (1, 1, 0)


def test_closing_with_reads_under_way_and_twice():
    source = MarkedSource()
    source.gate.clear()
    store = marked_store(source=source, io_threads=2, prefetch_threads=2)
    store.prefetch(KEYS)
    source.wait_begun(2)
    ticket = store.request([(2, 3), (1, 0)], "ar")
    arrivals = store.arrivals(ticket)
    open_gate_once_closing(source, pool_of(store))
    store.close()
    store.close()
    assert source.closed == 1 and len(source.moved) == 2, "what had not begun is not read any more"
    assert store.counters.prefetched == store.counters.used + store.counters.wasted
    with pytest.raises(MoexpError, match="closed"):
        list(arrivals)
    for call in (lambda: store.prefetch(KEYS), lambda: store.request(KEYS, "ar")):
        with pytest.raises(MoexpError, match="closed"):
            call()


class InterruptedQueue(SimpleQueue):
    """Ctrl-C strikes once, as the store turns to wait for a landing."""

    struck = False

    def get(self, *options):
        if not self.struck:
            self.struck = True
            signal.raise_signal(signal.SIGINT)
        return super().get(*options)


def test_interrupt_while_waiting():
    """Ctrl-C reaches `arrivals`, and the store can be used and closed after it."""
    source = MarkedSource()
    source.gate.clear()
    pool = TransferPool(source, StoreOptions(io_threads=1))
    pool.landed = InterruptedQueue()
    with marked_store(source=source, transport=pool) as store:
        ticket = store.request([(1, 0)], "ar")
        with pytest.raises(KeyboardInterrupt):
            list(store.arrivals(ticket))
        source.gate.set()
        [(key, weights)] = store.arrivals(ticket)
        assert_content(key, weights)


@pytest.mark.parametrize("place", ["plan", "take"])
def test_interrupt_inside_a_call(monkeypatch, place):
    """Wherever Ctrl-C strikes, closing ends the threads and the counts add up."""

    def interrupted(*_):
        raise KeyboardInterrupt

    source = MarkedSource()
    store = marked_store("lru", source=source)
    list(store.arrivals(store.request([(1, 0)], "ar")))
    with monkeypatch.context() as patch:
        patch.setattr(*((source, "plan") if place == "plan" else (store._slots, "take")), interrupted)
        for call in (lambda: store.request([(1, 1), (1, 2)], "ar"), lambda: store.prefetch([(2, 0), (2, 1)])):
            with pytest.raises(KeyboardInterrupt):
                call()
    store.close()
    assert not any(thread.is_alive() for thread in pool_of(store)._threads) and source.closed == 1
    assert store.counters.prefetched == store.counters.used + store.counters.wasted


def test_a_store_that_nobody_closed_leaves_no_threads():
    store = marked_store(io_threads=3)
    threads = pool_of(store)._threads
    assert len(threads) == 3
    del store
    gc.collect()
    for thread in threads:
        thread.join()


def test_budget_below_one_expert():
    with pytest.raises(MoexpError, match="holds no expert"):
        marked_store(capacity=0)


# --- files


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def tensors(request):
    return expert_tensors(layers=3, experts=4, width=40, hidden=72, dtype=request.param)


def assert_serves(store, tensors, index, **names) -> None:
    for layer in sorted({layer for layer, _ in index.keys}):
        store.begin_cycle()
        store.prefetch([(layer, 0)])
        keys = [key for key in index.keys if key[0] == layer]
        ticket = store.request(keys, "ar")
        arrived = dict(store.arrivals(ticket))
        assert sorted(arrived) == keys
        for key, weights in arrived.items():
            gate_up, down = expected(tensors, *key, **names)
            assert torch.equal(weights.gate_up, gate_up) and torch.equal(weights.down, down)
            assert weights.gate_up.is_contiguous() and weights.down.is_contiguous()
        store.release(ticket)


@pytest.mark.parametrize("kind", STORE_KINDS)
@pytest.mark.parametrize("shards", [1, 3])
def test_contents(tmp_path, tensors, kind, shards):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors, shards))
    with open_store(index, kind, options=StoreOptions(poison=True)) as store:
        assert_serves(store, tensors, index)
        assert store.expert_bytes == index.expert_bytes
        counters = store.counters
    assert counters.demanded == 12
    if kind == "resident":
        assert counters.hit == 12 and counters.read_bytes == 0
    else:
        assert counters.missed == 9 and counters.used == 3
        assert counters.read_bytes >= 12 * index.expert_bytes


@pytest.mark.parametrize("kind", STORE_KINDS)
@pytest.mark.parametrize("start", [0, 1, 2, 3, 4095])
def test_unaligned_contents(tmp_path, tensors, kind, start):
    index = ExpertIndex.from_checkpoint(save_in_order(tmp_path, tensors, start))
    with open_store(index, kind) as store:
        assert_serves(store, tensors, index)


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_contents_of_scattered_experts(tmp_path, kind):
    """Gate and up lie apart, and in different files."""
    tensors = expert_tensors(layers=2, width=40, hidden=72, names=APART)
    for folder, place in (("one", None), ("round", lambda number: number % 4)):
        shards = 1 if place is None else 4
        index = ExpertIndex.from_checkpoint(save_shards(tmp_path / folder, tensors, shards, place), APART)
        with open_store(index, kind) as store:
            assert_serves(store, tensors, index, names=APART)


def test_an_expert_at_the_very_end_of_a_file(tmp_path, tensors):
    last = {name: tensor for name, tensor in tensors.items() if "experts" in name}
    index = ExpertIndex.from_checkpoint(save_in_order(tmp_path, last))
    assert index.files[0].stat().st_size % PAGE
    with open_store(index) as store:
        assert_serves(store, last, index)


def test_bytes_are_those_asked_of_the_device(tmp_path):
    tensors = expert_tensors(experts=1, layers=1, width=512, hidden=4)
    index = ExpertIndex.from_checkpoint(save_in_order(tmp_path, {"big": torch.zeros(3000), **tensors}))
    span = index.locations[1, 0].ranges[0]
    size = index.files[0].stat().st_size
    with open_store(index) as store:
        list(store.arrivals(store.request([(1, 0)], "ar")))
        first, last = span.start // PAGE * PAGE, min(-(-span.stop // PAGE) * PAGE, size)
        assert store.counters.read_bytes == last - first


@pytest.mark.parametrize("kind", ["resident", "host"])
def test_conversion(tmp_path, kind):
    tensors = expert_tensors(dtype=torch.bfloat16)
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    with open_store(index, kind, dtype=torch.float32) as store:
        assert_serves(store, wide, index)
        assert store.expert_bytes == 2 * index.expert_bytes
    with pytest.raises(MoexpError, match="experts on disk are torch.bfloat16"):
        open_store(index, "disk", dtype=torch.float32)


def test_unknown_kind_lists_the_known(tmp_path):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, expert_tensors()))
    with pytest.raises(MoexpError, match="floppy.*resident, host, disk"):
        open_store(index, "floppy")


def test_a_shard_truncated_while_in_use(tmp_path, tensors):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors, 3))
    with open_store(index) as store:
        assert len(list(store.arrivals(store.request([(1, 0)], "ar")))) == 1
        for file in index.files:
            os.truncate(file, 1000)
        ticket = store.request([(2, 0), (2, 1)], "ar")
        with pytest.raises(MoexpError, match=r"layer 2: shard model-\d+-of-00003.safetensors ends before byte"):
            list(store.arrivals(ticket))
        store.release(ticket)


def test_a_read_error_names_the_shard(tmp_path, tensors, monkeypatch):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with open_store(index) as store:
        monkeypatch.setattr(dio.os, "preadv", broken)
        with pytest.raises(MoexpError, match="cannot read shard model.safetensors at byte .*Input/output error"):
            list(store.arrivals(store.request([(1, 0)], "ar")))


def test_short_reads_are_continued(tmp_path, tensors, monkeypatch):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))
    whole = os.preadv
    # in the middle of a page, where a direct read cannot go on
    monkeypatch.setattr(dio.os, "preadv", lambda *read: min(whole(*read), PAGE + 100))
    with open_store(index) as store:
        assert_serves(store, tensors, index)


def test_a_vanished_shard_is_named(tmp_path, tensors):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))
    index.files[0].unlink()
    for kind in STORE_KINDS:
        with pytest.raises(MoexpError, match=r"cannot open shard model\.safetensors"):
            open_store(index, kind)


@pytest.mark.parametrize("where", ["open", "read"])
def test_refused_o_direct_falls_back_with_one_warning(tmp_path, tensors, monkeypatch, where):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors, 3))
    real_open, real_read, direct = os.open, os.preadv, set()

    def refusing_open(path, flags, *rest):
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, *rest)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def refusing_read(fd, buffers, start):
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, start)

    monkeypatch.setattr(dio.os, "open", refusing_open)
    monkeypatch.setattr(dio.os, "preadv", refusing_read)
    with pytest.warns(RuntimeWarning, match="O_DIRECT is refused") as caught:
        store = open_store(index)
    assert len(caught) == 1
    assert isinstance(store, SlotStore) and isinstance(store.source, FileSource) and not store.source.direct
    assert_serves(store, tensors, index)
    store.close()


def test_open_files_are_closed(tmp_path, tensors):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors, 3))
    before = len(os.listdir("/proc/self/fd"))
    for kind in STORE_KINDS:
        open_store(index, kind).close()
    probe_bandwidth(index.files, 8192, total_bytes=1 << 16)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_splits_cover_each_range_once(tmp_path, tensors, splits):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors, 3, lambda number: number % 3))
    source = FileSource(index, open_shards(index.files), splits)
    for key, at in index.locations.items():
        for span in at.ranges:
            pieces = [p for p in source.plan(key).pieces if p.file == span.file and p.start < span.stop]
            pieces = [p for p in pieces if p.start + p.length > span.start]
            assert pieces[0].start <= span.start and pieces[-1].start + pieces[-1].needed >= span.stop
            for one, two in zip(pieces, pieces[1:], strict=False):
                assert one.start + one.length == two.start and one.offset + one.length == two.offset
            assert all(p.start % PAGE == p.length % PAGE == p.offset % PAGE == 0 for p in pieces)
    source.close()


# --- slots, pacing, bandwidth


def test_the_slot_freed_last_is_used_first_and_memory_does_not_grow():
    slots = Slots(100, torch.bfloat16, poison=True)
    taken = [slots.take() for _ in range(5)]
    allocated = slots.allocated
    assert len({id(slot) for slot in taken}) == 5
    for slot in taken:
        slot.elements[slot.first : slot.first + 50] = 1.0
        assert slot.elements[slot.first :].data_ptr() % PAGE == 0
    slots.give(taken[3])
    assert slots.take() is taken[3]
    assert taken[3].elements[taken[3].first : taken[3].first + 50].isnan().all(), "a freed slot is poisoned"
    assert (taken[2].elements[taken[2].first : taken[2].first + 50] == 1.0).all()
    for slot in taken:
        slots.give(slot)
    for _ in range(100):
        slots.give(slots.take())
    assert slots.allocated == allocated


def test_pacer_divides_one_link():
    pacer = Pacer(bandwidth_bytes_s=100.0, latency_s=1.0, concurrency=4)
    assert pacer.reserve(200, now_s=10.0) == 13.0  # 1 s latency, 2 s on the link
    assert pacer.reserve(100, now_s=10.0) == 14.0  # its latency passes meanwhile, then it has its turn
    assert pacer.reserve(100, now_s=20.0) == 22.0  # the link was idle


@pytest.mark.parametrize("wrong", [{"bandwidth_bytes_s": 0}, {"latency_s": -1}, {"concurrency": 0}])
def test_pacer_refuses_nonsense(wrong):
    with pytest.raises(MoexpError, match="store.pace"):
        Pacer(**{"bandwidth_bytes_s": 1.0, **wrong})


def test_paced_transfers_take_at_least_the_links_time():
    clock = FakeClock()
    pacer = Pacer(bandwidth_bytes_s=40 * EXPERT_BYTES, latency_s=0.01, concurrency=2)
    begin_s = clock.time_s
    with marked_store(source=MarkedSource(pieces=3), pacer=pacer, clock=clock) as store:
        for layer in (1, 2):
            keys = [(layer, expert) for expert in range(4)]
            assert len(list(store.arrivals(store.request(keys, "ar")))) == 4
    elapsed_s = clock.time_s - begin_s
    assert 8 / 40 + 0.01 <= elapsed_s <= 8 / 40 + 8 * 3 * 0.01 + 1e-9, "the latencies of transfers overlap or do not"
    assert store.counters.stall_s <= elapsed_s


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_paced_stores_serve_the_same(tmp_path, kind):
    tensors = expert_tensors(width=40, hidden=72)
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))
    pacer = Pacer(bandwidth_bytes_s=1e9, latency_s=1e-4, concurrency=2)
    with open_store(index, kind, options=StoreOptions(pacer=pacer)) as store:
        assert_serves(store, tensors, index)


def test_a_closed_store_holds_no_memory_though_it_is_still_known(tmp_path):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, expert_tensors(width=64, hidden=64), 2))
    store = open_store(index, "host")
    ticket = store.request(index.keys[:4], "ar")
    assert len(list(store.arrivals(ticket))) == 4 and store._slots.allocated >= 4  # type: ignore[attr-defined]
    store.release(ticket)
    store.close()
    assert not store._slots._free and not store._residency.entries  # type: ignore[attr-defined]


def test_closing_a_paced_store_does_not_wait_for_the_link():
    source = MarkedSource()
    store = marked_store(source=source, pacer=Pacer(bandwidth_bytes_s=EXPERT_BYTES / 1e6, concurrency=2))
    store.prefetch(KEYS)
    source.wait_begun(2)
    store.close()  # or the test's time is over: an expert takes eleven days


def test_probe_bandwidth(tmp_path):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, expert_tensors(width=64, hidden=64), 2))
    assert probe_bandwidth(index.files, 10_000, threads=3, total_bytes=1 << 18) > 1e5
    with pytest.raises(MoexpError, match="no file holds"):
        probe_bandwidth(index.files, 1 << 30)


def test_probe_bandwidth_reports_a_broken_device(tmp_path, monkeypatch):
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, expert_tensors(width=64, hidden=64)))
    calls = []

    def breaking(file, buffer, start, needed):
        calls.append(start)
        if len(calls) > 4:
            raise MoexpError("cannot read")

    monkeypatch.setattr(DiskFile, "read", breaking)
    with pytest.raises(MoexpError, match="cannot read"):
        probe_bandwidth(index.files, PAGE, threads=3, total_bytes=1 << 18)


def test_pool_ends_with_work_left_over():
    """Closing forgets queued pieces, and a worker that is moving one still lands it."""
    source = MarkedSource(pieces=4)
    source.gate.clear()
    pool = TransferPool(source, StoreOptions(io_threads=2))
    slots = Slots(EXPERT_BYTES, torch.float32)

    transfers = [Transfer((1, 0), source.plan((1, 0)), slots.take()) for _ in range(3)]
    pool.start(transfers, urgent=True)
    source.wait_begun(2)
    open_gate_once_closing(source, pool)
    pool.close()
    assert len(source.moved) == 2 and pool.landed.empty()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["resident", "host"])
def test_contents_on_a_gpu(tmp_path, kind):
    """Slots are reused at every layer while the compute stream is still busy with them."""
    tensors = expert_tensors(layers=20, experts=4, width=64, hidden=512, dtype=torch.bfloat16)
    index = ExpertIndex.from_checkpoint(save_shards(tmp_path, tensors))
    with open_store(index, kind, device="cuda", budget_bytes=2 * index.expert_bytes) as store:
        for layer in sorted({layer for layer, _ in index.keys}):
            ticket = store.request([(layer, expert) for expert in range(4)], "ar")
            sums = {}
            for key, weights in store.arrivals(ticket):
                torch.cuda._sleep(1_000_000)  # the kernels below have not run when the slot is given back
                sums[key] = (weights.gate_up.float().sum(), weights.down.float().sum())
            store.release(ticket)
            for key, found in sums.items():
                for got, tensor in zip(found, expected(tensors, *key), strict=True):
                    torch.testing.assert_close(got.cpu(), tensor.float().sum(), rtol=1e-3, atol=1e-2)
