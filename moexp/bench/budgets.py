"""Cache budgets: AR and the full method on disk with a part of the routed experts kept, by policy and by budget.

Every (policy, budget, method) decodes a prompt on a store of its own that begins empty and is filled by the prompt's
prefill, so none profits from another; all of them decode a prompt before any decodes the next. Each policy and budget
has a folder of records, and its recording is replayed by the simulator.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.bench.measure import keep_provenance, kept_probe, recording_info, sample_link, weights_hash
from moexp.bench.platforms import find_platform
from moexp.bench.runner import Job, PromptEngine, begin_run, run_methods, run_settings
from moexp.config.decode import StoreSection
from moexp.runtime.opening import opened_store
from moexp.runtime.recording.recorder import Recorder
from moexp.runtime.verifiers.sampling import Sampling

if TYPE_CHECKING:
    from moexp.runtime.decoding.method import Method
    from moexp.target.draft_expert import DraftExperts
    from moexp.target.load import Target

POLICIES = ("lru", "lfu", "least-stale", "static-hot")
PERCENTS = (0, 10, 25, 50, 100)
DISK = find_platform("local-disk")


@dataclass(frozen=True)
class Budget:
    """What may stay: a policy, and the part of the routed experts that fits."""

    policy: str
    percent: int

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.percent}"

    def section(self, target: Target, io_threads: int) -> StoreSection:
        """The store of it."""
        if self.percent == 0:
            return StoreSection(kind="disk", policy="none", io_threads=io_threads)
        pool = target.spec.num_layer_experts * target.index.expert_bytes
        pool = pool * target.dtype.itemsize // target.index.dtype.itemsize
        mib = pool * self.percent / 100 / 2**20
        return StoreSection.model_validate(
            {"kind": "disk", "policy": self.policy, "budget_mib": mib, "io_threads": io_threads}
        )


def all_budgets(percents: Sequence[int] = PERCENTS) -> list[Budget]:
    """Budget 0 once, the others by every policy."""
    kept = [Budget(policy, percent) for percent in percents if percent for policy in POLICIES]
    return [Budget("none", 0), *kept] if 0 in percents else kept


def measure_budgets(
    target: Target,
    experts: DraftExperts,
    folder: Path,
    budgets: Sequence[Budget],
    *,
    jobs: Sequence[Job],
    methods: Sequence[Method],
    sampling: Sampling,
    max_new_tokens: int,
    base: StoreSection,
    draft_weights: Path,
    threads: int,
) -> None:
    """Decodes all jobs by all methods under all budgets, in turns, into `<folder>/<policy>-<percent>`.

    Args:
        target: padded.
        base: the recipe's store, for its number of threads.
        draft_weights: folder of the draft experts.
        threads: torch's, for the records.
    """
    sections = {budget: budget.section(target, base.io_threads) for budget in budgets}
    weights, begun = weights_hash(draft_weights), set[Budget]()
    known = kept_probe(DISK, target, base, jobs[0], folder)
    for place_of_job, job in enumerate(jobs):
        for turn in range(len(budgets)):
            budget = budgets[(place_of_job + turn) % len(budgets)]
            section, place = sections[budget], folder / budget.name
            settings = run_settings(
                jobs,
                methods,
                max_new_tokens,
                tag=DISK.tag,
                target=target.fingerprint,
                expert_width=target.spec.expert_width,
                draft_experts=weights,
                temperature=sampling.temperature,
                threads=threads,
                store=section.model_dump(mode="json"),
            )
            done = begin_run(place, settings)
            missing = [method for method in methods if (job.request, method.label) not in done]
            if not missing:
                continue
            if budget not in begun:
                keep_provenance(place, sampling.seed)
                begun.add(budget)
            for method in missing if place_of_job % 2 == 0 else missing[::-1]:
                with opened_store(target, section) as store:
                    info = recording_info(target, store, section, methods)
                    done = begin_run(place, settings)
                    with Recorder(place, info, done) as recorder:
                        run_methods(
                            PromptEngine(target, store, draft_experts=experts),
                            [job],
                            [method],
                            sampling,
                            folder=place,
                            max_new_tokens=max_new_tokens,
                            stop_ids=target.stop_ids,
                            title=f"Budget {budget.name}",
                            recorder=recorder,
                        )
                    sample_link(DISK, target, store, known, folder)
                gc.collect()  # an engine and its store know each other: gigabytes
