"""Cache budgets: AR and the full method on disk with room for a part of the routed experts, by policy and by budget.

Every (policy, budget, method) decodes a prompt on a store of its own that begins empty and is filled by the prompt's
prefill, so none profits from another; all of them decode a prompt before any decodes the next. Each policy and budget
has a folder of records, and its recording is replayed by the simulator.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

from moexp.bench.draftexpert import methods_of, run_platform
from moexp.bench.engine import PromptEngine
from moexp.bench.folder import add_provenance, begin_run
from moexp.bench.jobs import RunPlan
from moexp.bench.measure import folder_probe, recording_info, sample_link
from moexp.bench.platforms import Platform, find_platform
from moexp.bench.runner import run_methods
from moexp.bench.setup import Setup
from moexp.config.decode import StoreSection
from moexp.config.locations import run_folder
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.runtime.opening import opened_store, traced_demands
from moexp.runtime.recording.files import ROUTING, read_recording
from moexp.runtime.recording.recorder import Recorder
from moexp.sim.validation.replay import compare, replay
from moexp.sim.validation.validate import RESIDENT, complete_steps, machine_of, resident_fit
from moexp.tables.budgets import budget_rows, write_budgets
from moexp.tables.core.run import PROBE, read_json
from moexp.target.load import Target, target_identity

FOLDER = "cache-budgets"
POLICIES = ("lru", "lfu", "least-stale", "static-hot")
PERCENTS = (10, 25, 50, 100)
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


ALL = (Budget("none", 0), *(Budget(policy, percent) for percent in PERCENTS for policy in POLICIES))
"""Budget 0 once, the others by every policy."""


def run_budgets(recipe: Recipe, prompts: int, tokens: int, results: Path = Path("results")) -> list[Path]:
    """Measures what is missing, replays all of it, and writes `results/<recipe>/cache_budgets.*` and the figure.

    Args:
        prompts: decoded under every budget, of the bench's workloads in turn.
        tokens: new ones a prompt.

    Raises:
        MoexpError: an earlier stage is missing, or the trace that static-hot needs.
    """
    base_folder = run_folder(recipe, None, "draftexpert")
    folder = base_folder / FOLDER
    with RunDir(base_folder, recipe):
        setup = Setup.open(recipe)
        if not (base_folder / RESIDENT / ROUTING).exists():
            run_platform(setup, Platform(RESIDENT, "measured", "resident"), base_folder)
        padded = setup.on(DISK)
        demands = traced_demands(target_identity(padded.target.folder))
        ar, *_, full = methods_of(recipe.decode, DISK, padded.target.spec.top_k)
        measure_budgets(padded, padded.plan(padded.jobs(prompts, prompts), [ar, full], tokens), folder)
    fit, probe, rows = resident_fit(base_folder / RESIDENT), read_json(folder / PROBE) or {}, []
    for budget in ALL:
        recording = read_recording(folder / budget.name)
        simulated = replay(recording, machine_of(recording, fit, probe), demands)
        rows += budget_rows(budget.policy, budget.percent, compare(complete_steps(folder / budget.name), simulated))
    return write_budgets(results, recipe.name, rows, folder / ALL[0].name)


def measure_budgets(setup: Setup, plan: RunPlan, folder: Path) -> None:
    """Decodes all jobs by all methods under all budgets, in turns, into `<folder>/<policy>-<percent>`.

    Args:
        setup: its target is padded.
    """
    known = folder_probe(DISK, setup, plan.jobs[0], folder)
    begun = set[Budget]()
    draft_hash = setup.draft_hash
    for number, job in enumerate(plan.jobs):
        first = number % len(ALL)
        for budget in (*ALL[first:], *ALL[:first]):
            section, part = budget.section(setup.target, setup.recipe.store.io_threads), folder / budget.name
            settings = setup.settings(plan, DISK.tag, draft_experts=draft_hash, store=section.model_dump(mode="json"))
            done = begin_run(part, settings)
            missing = [method for method in plan.methods if (job.request, method.label) not in done]
            if missing and budget not in begun:
                add_provenance(part, plan.sampling.seed)
                begun.add(budget)
            for method in missing if number % 2 == 0 else missing[::-1]:
                one = replace(plan, jobs=[job], methods=[method], title=f"Budget {budget.name}")
                with opened_store(setup.target, section) as store:
                    info = recording_info(setup.target, store, section, plan.methods)
                    engine = PromptEngine(setup.target, store, draft_experts=setup.experts)
                    with Recorder(part, info, begin_run(part, settings)) as recorder:
                        run_methods(engine, one, part, recorder=recorder)
                    sample_link(DISK, setup.target, store, known, folder)
                del engine, store
                gc.collect()  # an engine and its store know each other: gigabytes
