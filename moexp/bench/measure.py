"""One interleaved run on one platform: probe, store, engine, methods; all its records go to one folder."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.base.progress import stage
from moexp.bench.engine import PromptEngine
from moexp.bench.folder import add_provenance, begin_run, fitting_tokens, settle_tokens, settled_tokens
from moexp.bench.jobs import Job, RunPlan
from moexp.bench.platforms import Platform, probe, sample_bandwidth, store_section
from moexp.bench.probing import RunProbe
from moexp.bench.runner import run_methods
from moexp.bench.setup import Setup
from moexp.config.decode import StoreSection
from moexp.data.traces import RoutingGeometry
from moexp.records import RequestRecord
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import opened_store
from moexp.runtime.recording.files import RecordingInfo
from moexp.runtime.recording.recorder import Recorder
from moexp.runtime.store.store import ExpertStore
from moexp.tables.core.run import PROBE, read_json
from moexp.target.load import Target


def measure_on(
    setup: Setup,
    platform: Platform,
    plan: RunPlan,
    folder: Path,
    *,
    minutes: float | None = None,
    probed: dict[str, Any] | None = None,
    engines: Callable[[ExpertStore], Callable[[Method], PromptEngine]] | None = None,
    store: Callable[[], ExpertStore] | None = None,
) -> None:
    """Decodes all jobs by all methods on a platform into `folder`, unless it holds them already.

    Args:
        setup: its target is padded, where the platform wants that.
        minutes: the run is to take, about: each prompt gets as many of the plan's tokens as the warm-up promises.
        probed: the platform's probe, if it is known; by default it is probed here, and the disk sampled and steps
            timed while the methods run.
        engines: gives each method its engine over the platform's store; by default one for all.
        store: gives an open one of the platform's kind; by default one is opened and closed here.
    """
    done = begin_run(folder, _settings(setup, platform, plan, minutes))
    if plan.is_complete(done):
        return
    add_provenance(folder, plan.sampling.seed)
    known = probed or folder_probe(platform, setup, (*plan.warmup, *plan.jobs)[0], folder)
    section = store_section(platform, setup.recipe.store, known["bandwidth_bytes_s"][0] if platform.paced else None)
    settled = settled_tokens(folder)

    def fit(warmed: Sequence[RequestRecord]) -> int:
        assert minutes is not None
        return settle_tokens(folder, fitting_tokens(warmed, len(plan.jobs), 60 * minutes, plan.max_new_tokens))

    with ExitStack() as stack:
        target, experts = setup.target, setup.experts
        opened = stack.enter_context(opened_store(target, section)) if store is None else store()
        recorder, hooks = None, dict[str, Any]()
        if plan.batch == 1:
            recorder = stack.enter_context(
                Recorder(folder, recording_info(target, opened, section, plan.methods), done)
            )
            if engines is None and probed is None and platform.kind != "resident" and experts is not None:
                text = plan.jobs[0].prompt_ids
                probing = RunProbe(target, opened, experts, text, folder, bursts=not platform.paced)
                hooks["between"] = stack.enter_context(probing)
        if not probed:
            hooks["after_prompt"] = lambda: sample_link(platform, target, opened, known, folder)
        run_methods(
            PromptEngine(target, opened, draft_experts=experts) if engines is None else engines(opened),
            dataclasses.replace(
                plan, max_new_tokens=settled or plan.max_new_tokens, warmup_tokens=2 if platform.paced else 8
            ),
            folder,
            done=done,
            recorder=recorder,
            fit=fit if minutes is not None and settled is None else None,
            **hooks,
        )


def _settings(setup: Setup, platform: Platform, plan: RunPlan, minutes: float | None) -> dict[str, Any]:
    return setup.settings(
        plan,
        platform.tag,
        draft_experts=setup.draft_hash,
        batch=plan.batch,
        ratio={"value": platform.ratio.value, "of": platform.ratio.kind} if platform.ratio else None,
        minutes=minutes,
        **({} if plan.slice_s is None else {"slice_s": plan.slice_s}),
    )


def recording_info(
    target: Target, store: ExpertStore, section: StoreSection, methods: Sequence[Method]
) -> RecordingInfo:
    """What a recording of these methods on this store is of."""
    spec, source = target.spec, getattr(store, "source", None)
    moved, pieces = store.expert_bytes, 1
    if source is not None:
        plans = [source.plan(key) for key in target.index.keys]
        moved = round(statistics.fmean(plan.moved_bytes for plan in plans))
        pieces = max(len(plan.pieces) for plan in plans)
    return RecordingInfo(
        target.fingerprint,
        RoutingGeometry(spec.moe_layers, spec.num_experts, spec.top_k),
        {
            **section.model_dump(mode="json"),
            "capacity": getattr(store, "capacity", None),
            "expert_bytes": store.expert_bytes,
            "moved_bytes": moved,
            "pieces": pieces,
        },
        {method.label: dataclasses.asdict(method) for method in methods},
    )


def sample_link(platform: Platform, target: Target, store: ExpertStore, probed: dict[str, Any], folder: Path) -> None:
    """Adds a sample of the disk's bandwidth to the folder's probe; other links do not drift."""
    if platform.kind == "disk":
        probed["direct"] = bool(getattr(getattr(store, "source", None), "direct", False))
        samples = probed["bandwidth_bytes_s"]
        samples.append(sample_bandwidth(target, probed, seed=len(samples)))
        atomic.write_json(folder / PROBE, probed)


def folder_probe(platform: Platform, setup: Setup, job: Job, folder: Path) -> dict[str, Any]:
    """The folder's probe, or a new one: a resumed run keeps the link that it began with."""
    probed = read_json(folder / PROBE)
    if probed is None and platform.kind != "resident":
        with stage(f"Probe {platform.name}", None):
            probed = probe(platform, setup.target, setup.recipe.store, job)
        atomic.write_json(folder / PROBE, probed)
    return probed or {}
