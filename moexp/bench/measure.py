"""One interleaved run on one platform: probe, store, engine, methods; everything that is kept goes to one folder."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.base.progress import stage
from moexp.base.provenance import collect_provenance
from moexp.bench.platforms import Platform, probe, sample_bandwidth, store_section
from moexp.bench.probing import RunProbe
from moexp.bench.runner import (
    Job,
    PromptEngine,
    begin_run,
    fitting_tokens,
    is_complete,
    keep_tokens,
    kept_tokens,
    run_methods,
    run_settings,
)
from moexp.bench.turns import SLICE_S
from moexp.config.decode import StoreSection
from moexp.data.traces import RoutingGeometry
from moexp.records import RequestRecord
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import opened_store
from moexp.runtime.recording.files import RecordingInfo
from moexp.runtime.recording.recorder import Recorder
from moexp.runtime.store.store import ExpertStore
from moexp.runtime.verifiers.sampling import Sampling
from moexp.tables.core.run import PROBE, PROVENANCE, invocations, read_json
from moexp.target.draft_expert import WEIGHTS, DraftExperts
from moexp.target.load import Target


def measure_on(
    platform: Platform,
    target: Target,
    experts: DraftExperts | None,
    place: Path,
    *,
    jobs: Sequence[Job],
    methods: Sequence[Method],
    sampling: Sampling,
    max_new_tokens: int,
    warmup: Sequence[Job],
    base: StoreSection,
    draft_weights: Path | None,
    threads: int,
    title: str = "",
    probed: dict[str, Any] | None = None,
    engines: Callable[[ExpertStore], Callable[[Method], PromptEngine]] | None = None,
    batch: int = 1,
    store: Callable[[], ExpertStore] | None = None,
    minutes: float | None = None,
    slice_s: float | None = SLICE_S,
) -> bool:
    """Decodes all jobs by all methods on a platform into `place`; False where they are there already.

    Args:
        target: padded, where the platform wants that.
        warmup: decoded first, not counted.
        base: the recipe's store, for its number of threads.
        draft_weights: folder of the draft experts; None: none are used, or the folder `place` names them.
        threads: torch's, for the records.
        probed: the platform's probe, if it is known; by default it is probed here, and the disk sampled and steps
            timed while the methods run.
        engines: gives each method its engine over the platform's store; by default one for all.
        batch: jobs decoded together.
        store: gives an open one of the platform's kind; by default one is opened and closed here.
        minutes: the run is to take, about: each prompt gets as many of `max_new_tokens` as the warm-up promises.
        slice_s: of a method's turn on a prompt; None: each decodes its whole answer.
    """
    settings = run_settings(
        jobs,
        methods,
        max_new_tokens,
        tag=platform.tag,
        target=target.fingerprint,
        expert_width=target.spec.expert_width,
        draft_experts=None if draft_weights is None else weights_hash(draft_weights),
        temperature=sampling.temperature,
        threads=threads,
        batch=batch,
        ratio={"value": platform.ratio.value, "of": platform.ratio.of} if platform.ratio else None,
        minutes=minutes,
        **({} if slice_s is None else {"slice_s": slice_s}),
    )
    done = begin_run(place, settings)
    if is_complete(done, jobs, methods):
        return False
    keep_provenance(place, sampling.seed)
    known = probed or kept_probe(platform, target, base, (*warmup, *jobs)[0], place)
    link = known["bandwidth_bytes_s"][0] if platform.paced else None
    settled = kept_tokens(place)

    def fit(warmed: Sequence[RequestRecord]) -> int:
        assert minutes is not None
        return keep_tokens(place, fitting_tokens(warmed, len(jobs), 60 * minutes, max_new_tokens))

    section = store_section(platform, base, link)
    with ExitStack() as held:
        opened = held.enter_context(opened_store(target, section)) if store is None else store()
        info = recording_info(target, opened, section, methods)
        recorder = held.enter_context(Recorder(place, info, done)) if batch == 1 else None
        probing = None
        timed = engines is None and probed is None and platform.kind != "resident"
        if recorder is not None and timed and experts is not None:
            text = jobs[0].prompt_ids
            probing = held.enter_context(RunProbe(target, opened, experts, text, place, bursts=not platform.paced))
        run_methods(
            PromptEngine(target, opened, draft_experts=experts) if engines is None else engines(opened),
            jobs,
            methods,
            sampling,
            folder=place,
            done=done,
            max_new_tokens=settled or max_new_tokens,
            fit=fit if minutes is not None and settled is None else None,
            stop_ids=target.stop_ids,
            title=title or f"Bench {platform.name}",
            warmup=warmup,
            warmup_tokens=2 if platform.paced else 8,
            batch=batch,
            slice_s=slice_s,
            recorder=recorder,
            after_prompt=lambda: None if probed else sample_link(platform, target, opened, known, place),
            between=probing,
        )
    return True


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


def sample_link(platform: Platform, target: Target, store: ExpertStore, probed: dict[str, Any], place: Path) -> None:
    """Adds a sample of the disk's bandwidth to the folder's probe; other links do not drift."""
    if platform.kind == "disk":
        probed["direct"] = bool(getattr(getattr(store, "source", None), "direct", False))
        samples = probed["bandwidth_bytes_s"]
        samples.append(sample_bandwidth(target, probed, seed=len(samples)))
        atomic.write_json(place / PROBE, probed)


def kept_probe(platform: Platform, target: Target, base: StoreSection, job: Job, place: Path) -> dict[str, Any]:
    """The folder's probe, or a new one: a resumed run keeps the link that it began with."""
    found = read_json(place / PROBE)
    if found is None and platform.kind != "resident":
        with stage(f"Probe {platform.name}", None):
            found = probe(platform, target, base, job)
        atomic.write_json(place / PROBE, found)
    return found or {}


def keep_provenance(place: Path, seed: int) -> None:
    """Adds this invocation to those that had a part in the folder's records."""
    atomic.write_json(place / PROVENANCE, {"invocations": [*invocations(place), collect_provenance(seed)]})


def weights_hash(folder: Path) -> str:
    """Which draft experts lie in a folder: sixteen hex digits over their weights."""
    with open(folder / WEIGHTS, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
