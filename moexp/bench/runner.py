"""Interleaved runs: several methods decode the same prompts over one store, prompt by prompt; every cycle is recorded.

Speed drifts from minute to minute and from second to second, so methods are compared only where they took turns: all
of them decode a prompt before any decodes the next, a second each in turn where the store keeps nothing between cycles
(`moexp.bench.turns`), and the order rotates so that none always goes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moexp.base.progress import stage
from moexp.bench.engine import PromptEngine
from moexp.bench.jobs import Job, RunPlan
from moexp.bench.turns import in_turns
from moexp.records import RecordWriter, RequestRecord, StepRecord
from moexp.runtime.decoding.decode import decode_all, decode_batch
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Engine
from moexp.runtime.recording.files import RecordedPass
from moexp.runtime.recording.recorder import WARMUP, Recorder
from moexp.tables.core.run import REQUESTS, STEPS

Fit = Callable[[Sequence[RequestRecord]], int]
"""From the warm-up's records to new tokens a prompt."""


def run_methods(
    engine: PromptEngine | Callable[[Method], PromptEngine],
    plan: RunPlan,
    folder: Path,
    *,
    done: Collection[tuple[int, str]] = (),
    recorder: Recorder | None = None,
    fit: Fit | None = None,
    after_prompt: Callable[[], None] = lambda: None,
    between: Callable[[int], None] = lambda complete: None,
) -> None:
    """Decodes every job by every method and appends the records to `folder`.

    Args:
        engine: with the platform's store; or a function that gives each method its own, over the same store.
        done: pairs (request, method) to skip, as `begin_run` gives them.
        recorder: given what every request asks of the store; not for batches.
        fit: says how many new tokens a prompt gets instead of the plan's.
        after_prompt: called whenever the methods are through with a prompt (or a batch of them).
        between: called before each request (or batch, or turn) and after the last, with the number of complete ones.
    """
    assert recorder is None or plan.batch == 1, "a batch's passes cannot be told apart"
    complete = set(done)
    run = _Run(engine, plan, recorder, lambda: between(len(complete)))
    with (
        RecordWriter(folder / STEPS) as steps_file,
        RecordWriter(folder / REQUESTS) as requests_file,
        stage(plan.title, len(plan.jobs) * len(plan.methods)) as advance,
    ):
        warmed = run.warm_up()
        if fit is not None and warmed:
            run.plan = dataclasses.replace(plan, max_new_tokens=fit(warmed))
        for number, begin in enumerate(range(0, len(plan.jobs), plan.batch)):
            group, first = plan.jobs[begin : begin + plan.batch], number % len(plan.methods)
            turns = [*plan.methods[first:], *plan.methods[:first]]
            missing = {
                method.label: {job.request for job in group if (job.request, method.label) not in complete}
                for method in turns
            }
            for answer in run.answers(group, [method for method in turns if missing[method.label]]):
                label = answer.method.label
                for step in answer.steps:
                    if step.request in missing[label]:
                        steps_file.write(step)
                if recorder is not None:
                    only = answer.records[0]
                    recorder.keep(only.request, only.workload, label, answer.steps, answer.passes)
                for record in answer.records:
                    if record.request in missing[label]:
                        requests_file.write(record)
                complete |= {(request, label) for request in missing[label]}
                seconds = max(record.decode_s for record in answer.records)
                rate = sum(record.new_tokens for record in answer.records) / seconds if seconds else 0.0
                advance(len(complete), f"{label} {rate:.1f} tokens/s")
            if any(missing.values()):
                after_prompt()
        run.pause()


@dataclass(frozen=True)
class _Answer:
    """A method's answer to a prompt, or to a batch of them. `passes`: None where the recorder still holds them."""

    method: Method
    steps: list[StepRecord]
    records: list[RequestRecord]
    passes: list[RecordedPass] | None = None


@dataclass
class _Run:
    """Methods, their engines, and how they decode a prompt."""

    engine: PromptEngine | Callable[[Method], PromptEngine]
    plan: RunPlan
    recorder: Recorder | None
    pause: Callable[[], None]

    def engine_of(self, method: Method) -> PromptEngine:
        """A method's engine, observed by the recorder."""
        chosen = self.engine if isinstance(self.engine, PromptEngine) else self.engine(method)
        chosen.observe(self.recorder.log if self.recorder is not None else None)
        return chosen

    def warm_up(self) -> list[RequestRecord]:
        """Decodes the warm-up's jobs by all methods; the recording alone keeps them."""
        short = dataclasses.replace(self.plan, max_new_tokens=min(self.plan.warmup_tokens, self.plan.max_new_tokens))
        warmed = []
        for job in self.plan.warmup:
            for method in self.plan.methods:
                engine = self.engine_of(method)
                steps, records = _decode(engine, [job], method, short)
                engine.store.settle()
                warmed += records
                if self.recorder is not None:
                    self.recorder.keep(WARMUP, job.workload, method.label, steps)
        return warmed

    def answers(self, group: Sequence[Job], methods: Sequence[Method]) -> Iterator[_Answer]:
        """Each method's answer to a prompt or a batch, as it is through with it.

        Methods share the prompt's prefill: its time is that of the one that ran it.
        """
        engines = {method.label: self.engine_of(method) for method in methods}
        if self.plan.batch > 1 or self.plan.slice_s is None:
            for method in methods:
                self.pause()
                engine = engines[method.label]
                steps, records = _decode(engine, group, method, self.plan)
                engine.store.settle()
                if len(records) == 1:
                    records = [dataclasses.replace(records[0], prefill_s=engine.prefill_s)]
                yield _Answer(method, steps, records)
            return
        (job,) = group
        log = self.recorder.log if self.recorder is not None else None
        pairs = [(method, engines[method.label]) for method in methods]
        for turn in in_turns(self.plan, job, pairs, log, self.pause):
            assert turn.record is not None
            record = dataclasses.replace(turn.record, prefill_s=engines[turn.method.label].prefill_s)
            yield _Answer(turn.method, turn.steps, [record], turn.passes)


def _decode(
    engine: Engine, group: Sequence[Job], method: Method, plan: RunPlan
) -> tuple[list[StepRecord], list[RequestRecord]]:
    """One prompt alone, or several as a batch."""
    if len(group) > 1:
        return decode_batch(
            engine, [job.prompt_ids for job in group], method, plan.sampling, max_new_tokens=plan.max_new_tokens,
            stop_ids=plan.stop_ids, requests=[job.request for job in group], workloads=[job.workload for job in group],
        )  # fmt: skip
    (job,) = group
    steps, record = decode_all(
        engine, job.prompt_ids, method, plan.sampling, max_new_tokens=plan.max_new_tokens, stop_ids=plan.stop_ids,
        request=job.request, workload=job.workload,
    )  # fmt: skip
    return steps, [record]
