"""What probes beside a run say of it: costs that made their times, the nearest ones, links from bursts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moexp.bench.engine import PromptEngine
from moexp.bench.folder import begin_run
from moexp.bench.jobs import Job, RunPlan
from moexp.bench.measure import recording_info
from moexp.bench.probing import RunProbe
from moexp.bench.runner import run_methods
from moexp.config.decode import PaceSection, StoreSection
from moexp.records import ProbeRecord, RequestRecord, StepRecord, read_records
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import opened_store
from moexp.runtime.recording.files import read_recording
from moexp.runtime.recording.recorder import Recorder
from moexp.runtime.verifiers.sampling import Sampling
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.link import LinkModel
from moexp.sim.machine.machine import MachineModel
from moexp.sim.validation.probe_prices import AR_STEP, BURST, DRAFT_MORE, DRAFT_ONE, STEP_KINDS, VERIFY_STEP, Prices
from moexp.sim.validation.replay import compare, replay
from moexp.sim.validation.validate import request_prices, spans_of
from moexp.tables.core.run import PROBES, REQUESTS, STEPS
from moexp.target.load import Target, load_target
from tests.engines import StandInDrafts

LAYERS, MOE = 5, 4
DRAFT = ComputeCosts(0.002, attention_s=1e-3, router_s=2e-4, shared_s=4e-4, expert_s=5e-4, draft_expert_s=3e-4,
                     launch_s=1e-4, dense_layers=1)  # fmt: skip
BLOCK = ComputeCosts(0.003, attention_s=2e-3, router_s=3e-4, shared_s=6e-4, expert_s=7e-4, launch_s=1e-4,
                     dense_layers=1, draft=DRAFT)  # fmt: skip


def scaled(costs: ComputeCosts, by: float) -> ComputeCosts:
    """Every part `by` times as long."""
    return replace(costs, **{name: value * by for name, value in seconds(costs).items()})  # type: ignore[arg-type]


def step(costs: ComputeCosts, experts: int, *, drafting: bool = False, stall: float = 0.02) -> dict[str, float]:
    """What a stopwatch reads of a step that computes so many experts a layer, with any waiting."""
    resident = MOE * (costs.shared_s + experts * costs.launch_s + drafting * costs.draft_expert_s)
    attention, routed = LAYERS * costs.attention_s, MOE * experts * costs.expert_s + stall
    moe = MOE * costs.router_s + resident + routed
    return {
        "total": costs.fixed_s + attention + moe, "attention": attention, "moe": moe, "routed": routed, "stall": stall,
        "shared": 0.0 if drafting else resident, "draft": resident if drafting else 0.0, "experts": MOE * experts,
    }  # fmt: skip


def probes(place: int, by: float = 1.0) -> list[ProbeRecord]:
    parts = {
        DRAFT_ONE: step(scaled(DRAFT, by), 1, drafting=True),
        DRAFT_MORE: step(scaled(DRAFT, by), 3),
        AR_STEP: step(scaled(BLOCK, by), 6, stall=0.5),
        VERIFY_STEP: step(scaled(BLOCK, by), 18, stall=3.0),
    }
    return [ProbeRecord(place, kind, 1.0, of) for kind, of in parts.items()]


def seconds(costs: ComputeCosts) -> dict[str, float]:
    return {name: value for name, value in vars(costs).items() if name.endswith("_s")}


def test_costs_are_those_that_made_the_probes_however_long_they_waited():
    found = Prices(probes(0)).costs((7, 8), LAYERS, MOE)
    assert seconds(found) == pytest.approx(seconds(BLOCK))
    assert found.draft is not None and seconds(found.draft) == pytest.approx(seconds(DRAFT))
    assert found.dense_layers == 1


def test_a_request_is_priced_by_the_probes_nearest_to_it():
    prices = Prices([*probes(9, 4.0), *probes(1), *probes(0), *probes(20, 4.0), *probes(30, 100.0)])
    near = [prices.costs((n, n + 1), LAYERS, MOE).attention_s / BLOCK.attention_s for n in (0, 5, 25)]
    # its own, two before and two behind, as far as there are any, and the mean of them
    assert near == pytest.approx([2.0, 2.5, 36.0])


def test_requests_in_turns_are_priced_by_the_probes_of_their_turns():
    own = [record for place, by in ((3, 1.0), (3, 1.0), (4, 5.0), (5, 5.0)) for record in probes(place, by)]
    prices = Prices([*probes(1, 100.0), *own, *probes(6, 100.0)])
    assert prices.costs((3, 6), LAYERS, MOE).attention_s / BLOCK.attention_s == pytest.approx(3.0)
    requests = [RequestRecord(r, "chat", m, 1, 1, 0.0, 0.0, "length", [1]) for r, m in ((0, "a"), (0, "b"), (1, "b"))]
    assert spans_of(requests) == {(0, "a"): (0, 2), (0, "b"): (0, 2), (1, "b"): (2, 3)}


def test_links_follow_bursts_and_emulated_ones_stay():
    known = LinkModel(1.0, latency_s=2.0, concurrency=4, background=1)
    burst = ProbeRecord(0, BURST, 1.0, {"1": 0.5, "6": 1.0, "18": 2.0})
    assert Prices([burst]).link((3, 4), known, 1000) == LinkModel(9000.0, 2000.0, 0.0, 4, 1)
    assert Prices(probes(0)).link((3, 4), known, 1000) is known


def test_a_run_is_complete_with_all_kinds_of_steps():
    assert Prices(probes(0)).complete
    assert not Prices(probes(0)[1:]).complete


@pytest.fixture(scope="module")
def target(tiny_folder: Any) -> Target:
    return load_target(tiny_folder(model_type="glm4_moe"))


@pytest.mark.parametrize("paced", [False, True])
def test_probes_between_requests_change_nothing_of_a_run_and_price_it(target: Target, tmp_path: Path, paced: bool):
    drafts: Any = StandInDrafts(target.spec.hidden_size, target.spec.moe_layers, target.dtype)
    pace = PaceSection(bandwidth_gb_s=target.index.expert_bytes / 0.0005 / 1e9, concurrency=2)
    section = StoreSection(kind="host", pace=pace) if paced else StoreSection(kind="disk")
    jobs = [Job(number, str(number), "chat", tuple(range(3, 12 + number))) for number in range(2)]
    methods = [Method(), Method(drafter="top-r", r=1, max_draft=3, name="top-1")]

    def decode(place: Path, probed: bool) -> list[list[int]]:
        done = begin_run(place, {})
        with opened_store(target, section) as store:
            info = recording_info(target, store, section, methods)
            engine = PromptEngine(target, store, draft_experts=drafts)
            with (
                Recorder(place, info, done) as recorder,
                RunProbe(target, store, drafts, jobs[0].prompt_ids, place, bursts=not paced) as probe,
            ):
                options: Any = {"between": probe} if probed else {}
                run_methods(engine, RunPlan(jobs, methods, Sampling(), 6), place, recorder=recorder, **options)
        return [record.tokens for record in read_records(place / REQUESTS, RequestRecord)]

    assert decode(tmp_path / "probed", True) == decode(tmp_path / "plain", False)
    place = tmp_path / "probed"
    records = list(read_records(place / PROBES, ProbeRecord))
    assert {record.kind for record in records} == {*STEP_KINDS, *([] if paced else [BURST])}
    assert all(0 <= record.place <= len(jobs) * len(methods) for record in records)
    recording = read_recording(place)
    model = MachineModel(
        LinkModel(1e9, concurrency=2, serial=paced), ComputeCosts(), recording.info.store["moved_bytes"]
    )
    assert request_prices(tmp_path / "plain", recording, model) is None
    prices = request_prices(place, recording, model)
    assert prices is not None
    found = compare(read_records(place / STEPS, StepRecord), replay(recording, model, prices=prices))
    assert [one.method for one in found] == ["ar", "top-1"]
    assert all(one.counters_match and one.simulated_s > 0 for one in found)
    free = compare(read_records(place / STEPS, StepRecord), replay(recording, model))
    assert all(one.simulated_s > other.simulated_s for one, other in zip(found, free, strict=True))
