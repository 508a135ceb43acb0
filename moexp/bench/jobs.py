"""What a run decodes: prompts as jobs, and the plan by which methods take turns on them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from moexp.data.prompts import Prompt, load_prompts, render_chat
from moexp.runtime.decoding.method import Method
from moexp.runtime.verifiers.sampling import Sampling


@dataclass(frozen=True)
class Job:
    """One prompt to decode. `request` is its index in the run, `id` the prompt's own name."""

    request: int
    id: str
    workload: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class RunPlan:
    """Jobs, and the methods that decode them in turns.

    Attributes:
        methods: their labels differ.
        max_new_tokens: a prompt's.
        stop_ids: an answer ends with the first of them.
        title: of the progress line.
        warmup: jobs decoded first, not counted, `warmup_tokens` each by every method.
        batch: jobs decoded together.
        slice_s: methods take turns of so many seconds on each prompt; the store must keep nothing between cycles.
            None: each decodes its whole answer; and so do batches.
    """

    jobs: Sequence[Job]
    methods: Sequence[Method]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    title: str = "Bench"
    warmup: Sequence[Job] = ()
    warmup_tokens: int = 8
    batch: int = 1
    slice_s: float | None = None

    def __post_init__(self) -> None:
        labels = [method.label for method in self.methods]
        assert len(set(labels)) == len(labels), labels

    def settings(self, **more: Any) -> dict[str, Any]:
        """What tells a run from others: what was decoded and how, and `more` about the decoder."""
        return {
            "prompts": [job.id for job in self.jobs],
            "methods": [dataclasses.asdict(method) for method in self.methods],
            "max_new_tokens": self.max_new_tokens,
            **more,
        }

    def is_complete(self, done: Collection[tuple[int, str]]) -> bool:
        """Whether every method has decoded every job, by the complete pairs (request, method)."""
        return all((job.request, method.label) in done for job in self.jobs for method in self.methods)


def select_prompts(sources: Sequence[str], per_workload: int) -> list[Prompt]:
    """The first `per_workload` prompts of each source, in turn, so that any beginning of the list is balanced."""
    return _in_turn([load_prompts(source, per_workload) for source in sources])


def tuning_prompts(count: int) -> list[Prompt]:
    """Prompts that no table is measured on, their workloads in turn."""
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in load_prompts("tune"):
        by_workload.setdefault(prompt.workload, []).append(prompt)
    return _in_turn(list(by_workload.values()))[:count]


def make_jobs(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    """Prompts in the model's chat format."""
    return [
        Job(number, prompt.id, prompt.workload, tuple(render_chat(tokenizer, prompt)))
        for number, prompt in enumerate(prompts)
    ]


def _in_turn(lists: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    return [prompt for round_ in itertools.zip_longest(*lists) for prompt in round_ if prompt is not None]
