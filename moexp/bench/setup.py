"""What all measurements of a recipe share: its target, its draft experts and torch's threads, opened in one way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moexp.base.devices import prepare
from moexp.bench.jobs import Job, RunPlan, make_jobs, select_prompts, tuning_prompts
from moexp.bench.platforms import Platform
from moexp.config.locations import draft_folder
from moexp.config.recipe import Recipe
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import sampling_of
from moexp.target.draft_expert import WEIGHTS, DraftExperts
from moexp.target.load import Target
from moexp.target.opening import find_target, open_draft_experts, open_target


@dataclass(frozen=True)
class Setup:
    """A recipe with its target open.

    Attributes:
        experts: the recipe's draft experts; None: no method drafts with them, or each brings its own.
        threads: torch's.
    """

    recipe: Recipe
    target: Target
    experts: DraftExperts | None
    threads: int

    @classmethod
    def open(cls, recipe: Recipe, *, padded: bool = False, drafts: bool = True) -> Setup:
        """Opens the target, padded or not, and the draft experts where they are wanted.

        Raises:
            MoexpError: either is missing.
        """
        threads = prepare(recipe.threads)
        target = open_target(recipe, padded=padded)
        return cls(recipe, target, open_draft_experts(recipe, target) if drafts else None, threads)

    def on(self, platform: Platform) -> Setup:
        """The same with the padded copy of the target, where the platform asks for it."""
        if not platform.padded or find_target(self.recipe, padded=True) == self.target.folder:
            return self
        return replace(self, target=open_target(self.recipe, padded=True))

    def jobs(self, per_workload: int, limit: int | None = None) -> list[Job]:
        """The first prompts of each of the bench's workloads, in turn; at most `limit`."""
        return make_jobs(select_prompts(self.recipe.bench.workloads, per_workload)[:limit], self.target.tokenizer)

    def tuning_jobs(self, count: int) -> list[Job]:
        """Prompts that no table is measured on."""
        return make_jobs(tuning_prompts(count), self.target.tokenizer)

    def plan(self, jobs: Sequence[Job], methods: Sequence[Method], max_new_tokens: int, **options: Any) -> RunPlan:
        """A plan that samples as the recipe says and stops where the target does; `options` are a plan's."""
        sampling = sampling_of(self.recipe.decode, self.recipe.seed)
        return replace(RunPlan(jobs, methods, sampling, max_new_tokens, self.target.stop_ids), **options)

    def settings(self, plan: RunPlan, tag: str, **more: Any) -> dict[str, Any]:
        """What tells a run of the plan from others."""
        return plan.settings(
            tag=tag,
            target=self.target.fingerprint,
            expert_width=self.target.spec.expert_width,
            temperature=plan.sampling.temperature,
            threads=self.threads,
            **more,
        )

    @property
    def draft_hash(self) -> str | None:
        """Which draft experts these are: sixteen hex digits over their weights; None without any."""
        return None if self.experts is None else weights_hash(draft_folder(self.recipe))


def weights_hash(folder: Path) -> str:
    """Which draft experts lie in a folder: sixteen hex digits over their weights."""
    with open(folder / WEIGHTS, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
