"""Recordings of real runs: written and read back, refused when damaged, resumed, and replayed to the same counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moexp.base.errors import MoexpError
from moexp.bench.engine import PromptEngine
from moexp.bench.folder import begin_run
from moexp.bench.jobs import Job, RunPlan
from moexp.bench.measure import recording_info
from moexp.bench.runner import run_methods
from moexp.config.decode import PaceSection, StoreSection
from moexp.records import StepRecord, read_records
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import opened_store
from moexp.runtime.recording.files import ROUTING, Recording, read_recording
from moexp.runtime.recording.recorder import PARTS, WARMUP, Recorder
from moexp.runtime.store.disk import FileSource, open_shards
from moexp.runtime.store.policies import make_policy
from moexp.runtime.store.slot_store import SlotStore
from moexp.runtime.verifiers.sampling import Sampling
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.cycles import recorded_cycle
from moexp.sim.machine.link import LinkModel
from moexp.sim.machine.machine import MachineModel
from moexp.sim.routing.blocks import Setting, fixed_methods, recorded_blocks
from moexp.sim.validation.replay import EXACT, compare, replay
from moexp.sim.validation.validate import machine_of as validated_machine
from moexp.sim.validation.validate import resident_fit
from moexp.target.load import Target, load_target
from tests.engines import StandInDrafts, prompt
from tests.transports import InstantTransport, LinkTransport

pytestmark = pytest.mark.e2e

JOBS = [Job(number, f"job-{number}", "chat", tuple(prompt(9 + 20 * number, seed=number))) for number in range(2)]
DRAFTS = Method(drafter="draft-expert", max_draft=3)
METHODS = [
    Method(),
    Method(drafter="top-r", r=1, max_draft=3),
    DRAFTS,
    dataclasses.replace(DRAFTS, prefetch=True),
    dataclasses.replace(DRAFTS, policy="confidence-expansion", tau=0.9, budget=2, prefetch=True, prefetch_top=2),
    dataclasses.replace(DRAFTS, prefetch=True, prefetch_inline=False, name="late prefetch"),
]
FAST = LinkModel(1e30, concurrency=1 << 20)


SLOW = LinkModel(1e3, latency_s=0.1, concurrency=2, background=1)
"""An expert of some kilobytes takes seconds: prefetches are late, and those that have not begun are cancelled."""


def opened(target: Target, policy: str, capacity: int | None, link: LinkModel = FAST) -> SlotStore:
    """A store in which nothing depends on time: over `FAST`, a transfer has landed when it has started."""
    source = FileSource(target.index, open_shards(target.index.files))
    moved_bytes = round(fmean(source.plan(key).moved_bytes for key in target.index.keys))
    transport: Any = InstantTransport(source) if link is FAST else LinkTransport(source, link, moved_bytes)
    return SlotStore(
        source,
        make_policy(policy, {}),
        dtype=target.dtype,
        expert_bytes=target.index.expert_bytes,
        budget_bytes=None if capacity is None else capacity * target.index.expert_bytes,
        transport=transport,
    )


@pytest.fixture(scope="module")
def target(tiny_folder) -> Target:
    return load_target(tiny_folder(), dtype=torch.float32)


def record(
    target: Target, folder: Path, store: SlotStore, policy: str, methods=METHODS, jobs=JOBS, tokens=10, slice_s=None
) -> Recording:
    info = recording_info(target, store, StoreSection(kind="disk", policy=policy), methods)  # type: ignore[arg-type]
    done = begin_run(folder, {"policy": policy})
    drafts: Any = StandInDrafts(target.spec.hidden_size, target.spec.moe_layers, target.dtype)
    with Recorder(folder, info, done) as recorder:
        run_methods(
            PromptEngine(target, store, draft_experts=drafts, prefill_rows=16),
            RunPlan(jobs, methods, Sampling(), tokens, warmup=jobs[-1:], warmup_tokens=3, slice_s=slice_s),
            folder,
            done=done,
            recorder=recorder,
        )
    return read_recording(folder)


def machine_of(recording: Recording, link: LinkModel = FAST) -> MachineModel:
    """What `opened` is over: on `SLOW`, time passes in transfers alone."""
    store, attention_s = recording.info.store, 1e-3 if link is FAST else 0.0
    return MachineModel(link, ComputeCosts(attention_s=attention_s), store["moved_bytes"], store["capacity"])


def steps_of(folder: Path) -> list[StepRecord]:
    return list(read_records(folder / "steps.jsonl", StepRecord))


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize(
    "policy, capacity, prefetch",
    [("none", None, True), ("lru", 10, False), ("lru", 12, True), ("least-stale", 9, True)],
)
def test_a_replay_counts_what_the_run_counted(target: Target, tmp_path: Path, policy, capacity, prefetch, link):
    """AR, top-r and draft experts, with and without prefetch and cache, whether transfers land at once or late."""
    methods = [method for method in METHODS if prefetch or not method.prefetch]
    with opened(target, policy, capacity, link) as store:
        recording = record(target, tmp_path, store, policy, methods)
    steps = steps_of(tmp_path)
    found = compare(steps, replay(recording, machine_of(recording, link), demands={}))
    assert {one.method for one in found} == {method.label for method in methods}
    assert sum(one.cycles for one in found) == len(steps)
    for one in found:
        assert one.counters_match, (one.method, one.differing, one.counts)
        assert set(EXACT) <= set(one.counts) and one.counts["demanded"][0] > 0
    if prefetch:
        assert any(one.counts["prefetched"][0] for one in found) and any(one.counts["used"][0] for one in found)
    late, cancelled = (sum(step.store[name] for step in steps if step.store) for name in ("late", "cancelled"))
    assert (late > 0) == (link is SLOW and prefetch)
    assert (cancelled > 0) == (link is SLOW and policy == "none")


def test_turns_of_a_cycle_each_are_counted_and_recorded_as_whole_answers_are(target: Target, tmp_path: Path):
    found = {}
    for name, slice_s in (("whole", None), ("turns", 0.0), ("some", 0.02)):
        folder = tmp_path / name
        with opened(target, "none", None) as store:
            recording = record(target, folder, store, "none", slice_s=slice_s)
        steps = steps_of(folder)
        compared = compare(steps, replay(recording, machine_of(recording)))
        assert {one.method for one in compared} == {method.label for method in METHODS}
        assert all(one.counters_match for one in compared), [(one.method, one.differing) for one in compared]
        cycles = {
            method.label: [(one.request, one.cycle, [p.routing.tolist() for p in one.passes if p.phase != "prefill"])
                           for one in recording.of_method(method.label)]
            for method in METHODS
        }  # fmt: skip
        tokens = {(one.request, one.method, one.cycle): (one.tokens, one.confidences) for one in steps}
        names = ("demanded", "missed", "prefetched", "used", "cancelled")
        counts = {(one.request, one.method, one.cycle): [one.store[name] for name in names] for one in steps}
        found[name] = cycles, tokens, counts
    assert found["turns"] == found["whole"] == found["some"]


def test_a_recording_is_what_was_routed(target: Target, tmp_path: Path):
    with opened(target, "none", None) as store:
        recording = record(target, tmp_path, store, "none", METHODS[:3])
    spec, steps = target.spec, steps_of(tmp_path)
    info = recording.info
    assert (info.target, info.geometry.layers, info.geometry.top_k) == (target.fingerprint, spec.moe_layers, spec.top_k)
    assert info.store["kind"] == "disk" and info.store["moved_bytes"] >= info.store["expert_bytes"]
    assert fixed_methods(recording) == ["top-1 K3", "draft-expert K3"]
    assert not (tmp_path / PARTS).exists()
    for method in METHODS[:3]:
        cycles = recording.of_method(method.label)
        mine = [step for step in steps if step.method == method.label]
        assert [(one.request, one.cycle, one.accepted, one.emitted) for one in cycles] == [
            (step.request, step.cycle, step.accepted, step.emitted) for step in mine
        ]
        for one, step in zip(cycles, mine, strict=True):
            assert [draft.confidence for draft in one.drafts] == step.confidences
            verified = one.passes[-1].routing
            assert verified.shape == (len(spec.moe_layers), step.drafted + 1, spec.top_k)
            assert sum(len(np.unique(ids)) for ids in verified) == step.unique_verify
    prefills = [one for one in recording.cycles if one.cycle < 0]
    assert len([one for one in prefills if one.request >= 0]) == sum(
        -(-(len(job.prompt_ids) - 1) // 16) for job in JOBS
    )
    assert any(one.request == WARMUP for one in recording.cycles)


def test_shorter_blocks_are_prefixes(target: Target, tmp_path: Path):
    with opened(target, "none", None) as store:
        recording = record(target, tmp_path, store, "none", [DRAFTS])
    recorded = recording.of_method(DRAFTS.label)
    blocks = recorded_blocks(recording, DRAFTS.label)
    same = blocks.cycles(Setting(max_draft=3))
    assert [cycle.events for cycle in same] == [recorded_cycle(blocks.table, one).events for one in recorded]
    assert [cycle.emitted for cycle in same] == [one.emitted for one in recorded]
    shorter = blocks.cycles(Setting(max_draft=1))
    assert [cycle.emitted for cycle in shorter] == [min(one.emitted, 2) for one in recorded]
    assert all(len(cycle.events) <= 2 for cycle in shorter)
    doubtful = Setting(max_draft=3, policy="confidence-expansion", tau=1.0, budget=0)
    assert all(cycle.events[-1].rows == 1 for cycle in blocks.cycles(doubtful))  # type: ignore[union-attr]
    assert sum(cycle.emitted for cycle in blocks.ar()) == sum(one.emitted for one in recorded)
    wide = recorded_blocks(recording, DRAFTS.label, layers=7)
    assert len(wide.ar()[0].events[0].demands) == 7  # type: ignore[union-attr]
    with pytest.raises(MoexpError, match="K = 9.*1 to 3"):
        blocks.cycles(Setting(max_draft=9))
    with pytest.raises(MoexpError, match="no blocks of full length by 'other'.*draft-expert K3"):
        recorded_blocks(recording, "other")


def test_damaged_and_foreign_files_are_refused(target: Target, tmp_path: Path):
    with pytest.raises(MoexpError, match="no recording"):
        read_recording(tmp_path)
    with opened(target, "none", None) as store:
        record(target, tmp_path, store, "none", METHODS[:1], JOBS[:1])
    path = tmp_path / ROUTING
    whole = path.read_bytes()
    table = pq.read_table(path)
    wrong_ids = table.set_column(
        table.schema.get_field_index("routing"), table.schema.field("routing"),
        pa.array([[99] * len(ids) for ids in table.column("routing").to_pylist()], table.schema.field("routing").type),
    )  # fmt: skip
    for damage in (whole[: len(whole) // 2], b"", b"not a file of this kind", table.drop_columns(["cycle"]),
                   table.replace_schema_metadata({}), table.slice(0, len(table) - 1), wrong_ids):  # fmt: skip
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        else:
            pq.write_table(damage, path)
        if isinstance(damage, pa.Table) and len(damage) < len(table):
            assert read_recording(path)  # ends with a whole cycle: AR cycles are single passes
            continue
        with pytest.raises(MoexpError, match="not a recording, or a damaged one"):
            read_recording(path)


def test_a_killed_run_keeps_what_is_complete(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed inside the second request: resumed, each request is there once, and the replay is exact again."""
    methods = METHODS[:1] + METHODS[3:4]
    kept = Recorder.keep
    calls = []

    def keep(self: Recorder, request: int, *rest: Any) -> None:
        kept(self, request, *rest)
        calls.append(request)
        if calls.count(0) == 2 or calls.count(1) == 1:
            raise KeyboardInterrupt  # its part is written, its record is not

    with opened(target, "none", None) as store, monkeypatch.context() as patch:
        patch.setattr(Recorder, "keep", keep)
        patch.setattr(Recorder, "close", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            record(target, tmp_path, store, "none", methods)
    assert (tmp_path / PARTS).exists() and not (tmp_path / ROUTING).exists()
    with opened(target, "none", None) as store:
        recording = record(target, tmp_path, store, "none", methods)
    steps = steps_of(tmp_path)
    mine = [(one.request, one.method, one.cycle) for one in recording.cycles if one.request >= 0 <= one.cycle]
    assert sorted(mine) == sorted((step.request, step.method, step.cycle) for step in steps)
    assert len({one.session for one in recording.cycles}) == 2
    assert all(one.counters_match for one in compare(steps, replay(recording, machine_of(recording))))


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_paced_run_takes_about_what_is_simulated(target: Target, tmp_path: Path, concurrency):
    """Computing is fitted on a resident run, the link is the pacer's: times of a real run, unseen, to a third."""
    pace = PaceSection(bandwidth_gb_s=target.index.expert_bytes / 0.004 / 1e9, concurrency=concurrency)
    drafts: Any = StandInDrafts(target.spec.hidden_size, target.spec.moe_layers, target.dtype)
    top_2 = Method(drafter="top-r", r=2, max_draft=3)
    sections = {
        "resident": (StoreSection(kind="resident"), [Method(), METHODS[1], top_2, DRAFTS]),
        "paced": (StoreSection(kind="host", pace=pace), METHODS),
    }
    for name, (section, methods) in sections.items():
        done = begin_run(tmp_path / name, {})
        with opened_store(target, section) as store:
            info = recording_info(target, store, section, methods)
            with Recorder(tmp_path / name, info, done) as recorder:
                engine = PromptEngine(target, store, draft_experts=drafts, prefill_rows=16)
                plan = RunPlan(JOBS, methods, Sampling(), 16, warmup=JOBS[-1:])
                run_methods(engine, plan, tmp_path / name, recorder=recorder)
    recording = read_recording(tmp_path / "paced")
    model = validated_machine(recording, resident_fit(tmp_path / "resident"), {})
    for one in compare(steps_of(tmp_path / "paced"), replay(recording, model)):
        assert one.time_error is not None and abs(one.time_error) < 1 / 3, (one.method, one.time_error)
