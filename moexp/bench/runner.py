"""Interleaved runs: several methods decode the same prompts over one store, prompt by prompt, and every cycle is kept.

Speed drifts from minute to minute and from second to second, so methods are compared only where they took turns: all
of them decode a prompt before any decodes the next, a second each in turn where the store keeps nothing between cycles
(`moexp.bench.turns`), and the order rotates so that none always goes first.

A platform's folder holds `settings.json` (what was measured), `steps.jsonl`, `requests.jsonl` and `routing.parquet`
(what was asked of the store; not of batches), and `probes.jsonl` where the machine was probed on the way. The request
is the unit of resuming: its steps are written first and its record last, so a pair (prompt, method) is either complete
or measured again, with those whose turns it shared.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moexp.base import atomic
from moexp.base.progress import stage
from moexp.bench.turns import in_turns
from moexp.data.prompts import Prompt, load_prompts, render_chat
from moexp.records import RecordWriter, RequestRecord, StepRecord, read_records
from moexp.runtime.decoding.decode import decode_all, decode_batch
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import Engine
from moexp.runtime.engine.kv import BlockCache
from moexp.runtime.recording.files import ROUTING, RecordedPass
from moexp.runtime.recording.recorder import PARTS, WARMUP, Recorder
from moexp.runtime.store.store import ExpertStore
from moexp.runtime.verifiers.sampling import Sampling
from moexp.tables.core.run import NEW_TOKENS, PROBE, PROBES, PROVENANCE, REQUESTS, SETTINGS, STEPS

FEWEST_TOKENS = 4


@dataclass(frozen=True)
class Job:
    """One prompt to decode. `request` is its index in the run, `id` the prompt's own name."""

    request: int
    id: str
    workload: str
    prompt_ids: tuple[int, ...]


class PromptEngine(Engine):
    """An engine that keeps the last prompt's keys and values, so that methods that take turns on it prefill it once.

    Every method's prefill is the same computation, and decoding writes only behind it: nothing else changes.

    Attributes:
        prefill_store: where prompts take their experts from, in place of `store`; the same weights.
        prefill_s: seconds that the prompt took.
    """

    prefill_store: ExpertStore | None = None
    prefill_s = 0.0
    _held: tuple[int, ...] = ()
    _held_in: BlockCache | None = None
    _held_features: Sequence[Tensor] = ()

    def prefill(self, ids: Sequence[int]) -> None:
        """As the engine's; at once where a cache still holds these very ids, the request's own or another's."""
        prompt = tuple(ids)
        if prompt and prompt == self._held and self._held_in is not None:
            self.state.restore(self._held_in, self._held_features, len(prompt))
            return
        self._held_in = None  # whatever stops the prefill, what the cache holds then is not a prompt
        decoding = self.store
        self.store = self.prefill_store or decoding
        begin_s = time.perf_counter()
        try:
            super().prefill(ids)
        finally:
            self.store = decoding
        self.prefill_s = time.perf_counter() - begin_s
        self._held, self._held_in, self._held_features = prompt, self.cache, list(self.state.features)


def select_prompts(sources: Sequence[str], per_workload: int) -> list[Prompt]:
    """The first `per_workload` prompts of each source, in turn, so that any beginning of the list is balanced."""
    by_source = [load_prompts(source, per_workload) for source in sources]
    return [prompts[place] for place in range(per_workload) for prompts in by_source if place < len(prompts)]


def tuning_prompts(count: int | None = None) -> list[Prompt]:
    """Prompts that no table is measured on, their workloads in turn."""
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in load_prompts("tune"):
        by_workload.setdefault(prompt.workload, []).append(prompt)
    longest = max(map(len, by_workload.values()))
    turns = [prompts[n] for n in range(longest) for prompts in by_workload.values() if n < len(prompts)]
    return turns[:count]


def make_jobs(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    """Prompts in the model's chat format."""
    return [
        Job(number, prompt.id, prompt.workload, tuple(render_chat(tokenizer, prompt)))
        for number, prompt in enumerate(prompts)
    ]


def run_settings(jobs: Sequence[Job], methods: Sequence[Method], max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """What `begin_run` tells a run by: what was decoded and how, and `more` of what decoded it."""
    return {
        "prompts": [job.id for job in jobs],
        "methods": [dataclasses.asdict(method) for method in methods],
        "max_new_tokens": max_new_tokens,
        **more,
    }


def begin_run(folder: Path, settings: dict[str, Any]) -> set[tuple[int, str]]:
    """Readies a platform's folder for `settings` (plain JSON); returns the complete pairs (request, method).

    Records of other settings do not mix with these: the old files are renamed to `*.old`, one generation of them is
    kept. Steps of a request that was cut off are dropped.
    """
    settings = json.loads(json.dumps(settings))
    kept = dict(_read_settings(folder / SETTINGS) or {})
    kept.pop(NEW_TOKENS, None)
    if kept != settings:
        for name in (SETTINGS, PROBE, PROBES, PROVENANCE, STEPS, REQUESTS, ROUTING):
            if (folder / name).exists():
                (folder / name).replace(folder / f"{name}.old")
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        atomic.write_json(folder / SETTINGS, settings)
        return set()
    done = {(record.request, record.method) for record in _resume(folder / REQUESTS, RequestRecord)}
    steps = list(_resume(folder / STEPS, StepRecord))
    whole = [step for step in steps if (step.request, step.method) in done]
    if len(whole) < len(steps):
        lines = [json.dumps(dataclasses.asdict(step), separators=(",", ":")) + "\n" for step in whole]
        atomic.write_text(folder / STEPS, "".join(lines))
    return done


def fitting_tokens(warmed: Sequence[RequestRecord], prompts: int, seconds: float, asked: int) -> int:
    """New tokens a prompt that let a run end in time: at most `asked`, at least the fewest that say something.

    Args:
        warmed: a warm-up's records, of all methods that will run.
        prompts: that each of them is to decode.
        seconds: that the run may take, prefills included.
    """
    token_s = prefill_s = 0.0
    for method in {record.method for record in warmed}:
        mine = [record for record in warmed if record.method == method]
        token_s += sum(record.decode_s for record in mine) / max(1, sum(record.new_tokens for record in mine))
        prefill_s += sum(record.prefill_s for record in mine) / len(mine)
    if not token_s or not prompts:
        return asked
    return max(min(asked, FEWEST_TOKENS), min(asked, int((seconds / prompts - prefill_s) / token_s)))


def kept_tokens(folder: Path) -> int | None:
    """New tokens a prompt that `folder`'s run settled on; None: it has not, or does not."""
    found = (_read_settings(folder / SETTINGS) or {}).get(NEW_TOKENS)
    return found if isinstance(found, int) else None


def keep_tokens(folder: Path, tokens: int) -> int:
    """Keeps how many new tokens a prompt the run settled on, for it to be resumed with them."""
    atomic.write_json(folder / SETTINGS, {**_read_settings(folder / SETTINGS), NEW_TOKENS: tokens})
    return tokens


def is_complete(done: Collection[tuple[int, str]], jobs: Sequence[Job], methods: Sequence[Method]) -> bool:
    """Whether every method has decoded every job."""
    return all((job.request, method.label) in done for job in jobs for method in methods)


def run_methods(
    engine: PromptEngine | Callable[[Method], PromptEngine],
    jobs: Sequence[Job],
    methods: Sequence[Method],
    sampling: Sampling,
    *,
    folder: Path,
    done: Collection[tuple[int, str]] = (),
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    title: str = "Bench",
    warmup: Sequence[Job] = (),
    warmup_tokens: int = 8,
    after_prompt: Callable[[], None] = lambda: None,
    between: Callable[[int], None] | None = None,
    batch: int = 1,
    recorder: Recorder | None = None,
    fit: Callable[[Sequence[RequestRecord]], int] | None = None,
    slice_s: float | None = None,
) -> None:
    """Decodes every job by every method and appends the records to `folder`.

    Args:
        engine: with the platform's store; or a function that gives each method its own, over the same store.
        methods: their labels must differ.
        done: pairs (request, method) to skip, as `begin_run` gives them.
        warmup: jobs decoded first, not counted, `warmup_tokens` each by every method.
        after_prompt: called whenever the methods are through with a prompt (or a batch of them).
        between: called before each request (or batch, or turn) and after the last, with the number of complete ones.
        batch: jobs decoded together.
        recorder: given what every request asks of the store; not for batches.
        fit: given the warm-up's records, says how many new tokens a prompt gets in place of `max_new_tokens`.
        slice_s: methods take turns of so many seconds on each prompt; the store must keep nothing between cycles.
            None: each decodes its whole answer; and so do batches.
    """
    assert recorder is None or batch == 1, "a batch's passes cannot be told apart"
    labels = [method.label for method in methods]
    assert len(set(labels)) == len(labels), labels
    total = len(jobs) * len(methods)
    measured: list[tuple[int, str]] = []

    def engine_of(method: Method) -> PromptEngine:
        chosen = engine if isinstance(engine, PromptEngine) else engine(method)
        chosen.observe(recorder.log if recorder is not None else None)
        return chosen

    def pause() -> None:
        if between is not None:
            between(len(done) + len(measured))

    with (
        RecordWriter(folder / STEPS) as steps_file,
        RecordWriter(folder / REQUESTS) as requests_file,
        stage(title, total) as advance,
    ):
        warmed = []
        for job in warmup:
            for method in methods:
                tokens = min(warmup_tokens, max_new_tokens)
                chosen = engine_of(method)
                steps, record = _decode(chosen, job, method, sampling, tokens, stop_ids)
                chosen.store.settle()
                warmed.append(record)
                if recorder is not None:
                    recorder.keep(WARMUP, record.workload, record.method, steps)
        if fit is not None and warmed:
            max_new_tokens = fit(warmed)
        log = recorder.log if recorder is not None else None

        def answered(group: Sequence[Job], wanted: Sequence[Method]) -> Iterator[_Answers]:
            engines = {method.label: engine_of(method) for method in wanted}
            options: Any = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
            if batch > 1 or slice_s is None:
                for method in wanted:
                    pause()
                    found = _decode_group(engines[method.label], group, method, sampling, **options)
                    engines[method.label].store.settle()
                    yield _Answers(method, engines[method.label], *found)
                return
            (job,) = group
            options |= {"request": job.request, "workload": job.workload, "slice_s": slice_s}
            pairs = [(method, engines[method.label]) for method in wanted]
            for one in in_turns(pairs, job.prompt_ids, sampling, log=log, between=pause, **options):
                yield _Answers(one.method, engines[one.method.label], one.steps, [one.record], one.passes)

        groups = [jobs[begin : begin + batch] for begin in range(0, len(jobs), batch)]
        for place, group in enumerate(groups):
            before = len(measured)
            turns = [methods[(place + turn) % len(methods)] for turn in range(len(methods))]
            wanted = [m for m in turns if any((job.request, m.label) not in done for job in group)]

            for answers in answered(group, wanted):
                method, steps, records = answers.method, answers.steps, answers.records
                missing = [job.request for job in group if (job.request, method.label) not in done]
                for step in steps:
                    if step.request in missing:
                        steps_file.write(step)
                if recorder is not None:
                    recorder.keep(records[0].request, records[0].workload, method.label, steps, answers.passes)
                for record in records:
                    if record.request in missing:
                        requests_file.write(dataclasses.replace(record, prefill_s=answers.prefill_s(record)))
                measured += [(request, method.label) for request in missing]
                seconds = max(record.decode_s for record in records)
                rate = sum(record.new_tokens for record in records) / seconds if seconds else 0.0
                advance(len(done) + len(measured), f"{method.label} {rate:.1f} tokens/s")
            if len(measured) > before:
                after_prompt()
        pause()


@dataclass(frozen=True)
class _Answers:
    """What a method made of a prompt, or of a batch of them. `passes`: None where the recorder still holds them."""

    method: Method
    engine: PromptEngine
    steps: list[StepRecord]
    records: list[RequestRecord]
    passes: list[RecordedPass] | None = None

    def prefill_s(self, record: RequestRecord) -> float:
        """Methods share the prompt's prefill: its time is that of the one that ran it."""
        return self.engine.prefill_s if len(self.records) == 1 else record.prefill_s


def _decode_group(
    engine: Engine,
    group: Sequence[Job],
    method: Method,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> tuple[list[StepRecord], list[RequestRecord]]:
    if len(group) == 1:
        steps, record = _decode(engine, group[0], method, sampling, max_new_tokens, stop_ids)
        return steps, [record]
    return decode_batch(
        engine,
        [job.prompt_ids for job in group],
        method,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        requests=[job.request for job in group],
        workloads=[job.workload for job in group],
    )


def _decode(
    engine: Engine, job: Job, method: Method, sampling: Sampling, max_new_tokens: int, stop_ids: Collection[int]
) -> tuple[list[StepRecord], RequestRecord]:
    return decode_all(
        engine,
        job.prompt_ids,
        method,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        request=job.request,
        workload=job.workload,
    )


def _resume(path: Path, kind: type[Any]) -> Iterable[Any]:
    return read_records(path, kind, resuming=True) if path.exists() else ()


def _read_settings(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
