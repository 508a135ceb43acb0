"""The public benchmarks that the two papers measure on: where their rows are, and the prompt that a row gives.

EcoSpec's seven with the prompts of its appendix E, spaces as printed there; and sets for DraftExpert's five kinds
of prompts, of which that paper names two (GSM8K, MBPP) and prints no prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.base.hub import hub_rows
from moexp.data.json_rows import Row, json_rows, pick_id, pick_texts

TURNS = "turns"
QUESTION_ID = "question_id"  # what local copies number their rows by, whatever the hub calls it


@dataclass(frozen=True)
class Exemplars:
    """Answered rows that stand before a question, the first `count` of another split."""

    hub: str  # `repo:config:split`
    file: str  # a local copy's name, beside the local copy of the benchmark
    count: int
    answer: str  # the field that follows the prompt of such a row


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its rows and its prompt. `name` is the source's and the workload's."""

    name: str
    hub: str  # `repo[:config]:split`
    fields: tuple[str, ...]
    """Where a row's text is: the first that it has, under the hub's name. A list of texts is as many turns."""
    template: str = "{text}"
    context: str | None = None  # a field that follows the text after a blank line, where it is not empty
    id_field: str | None = None
    exemplars: Exemplars | None = None
    streaming: bool = False  # read over the network row by row: the set is large
    drop: tuple[str, ...] = ()  # columns of the hub's data set that are never decoded

    def turns(self, row: Row, where: str) -> tuple[str, ...]:
        """The user's messages of a row, exemplars left out; a row's own `turns` stand as they are.

        Raises:
            MoexpError: none of `fields` is there, or it holds no text.
        """
        texts = pick_texts(row, (TURNS, *self.fields), where)
        if not any(text.strip() for text in texts):
            raise MoexpError("empty prompt", where=where)
        if TURNS in row:
            return texts
        if self.context and row.get(self.context):
            texts = (*texts[:-1], f"{texts[-1]}\n\n{row[self.context]}")
        return tuple(self.template.replace("{text}", text) for text in texts)


PROBLEM = "Problem:\n {text}\n\n Solution:"

_ALL = (
    Benchmark(
        "gsm8k",
        "openai/gsm8k:main:test",
        ("question",),
        "Question: {text}\nAnswer:",
        exemplars=Exemplars("openai/gsm8k:main:train", "gsm8k_train.jsonl", 5, "answer"),
    ),
    Benchmark("humaneval", "openai/openai_humaneval:test", ("prompt",), id_field="task_id"),
    Benchmark(
        "aime25",
        "math-ai/aime25:test",
        ("problem", "question"),
        "{text}\n Please reason step by step, and put your final answer within \\boxed{}.",
        id_field="id",
    ),
    Benchmark("math500", "HuggingFaceH4/MATH-500:test", ("problem",), PROBLEM, id_field="unique_id"),
    # AMC 12 of 2022 and 2023, each problem reworded to have an integer answer: what AI-MO has published.
    Benchmark("amc22-24", "AI-MO/aimo-validation-amc:train", ("problem",), PROBLEM, id_field="id"),
    Benchmark("mt-bench", "HuggingFaceH4/mt_bench_prompts:train", ("prompt",), id_field="prompt_id"),
    Benchmark("mmstar", "Lin-Chen/MMStar:val", ("question",), id_field="index", drop=("image",)),
    # The 257 test problems of the sanitized set.
    Benchmark("mbpp", "google-research-datasets/mbpp:sanitized:test", ("prompt", "text"), id_field="task_id"),
    Benchmark("alpaca", "tatsu-lab/alpaca:train", ("instruction",), context="input"),
    Benchmark(
        "cnn-dm",
        "abisee/cnn_dailymail:3.0.0:test",
        ("article",),
        "Summarize: {text}",
        id_field="id",
        streaming=True,
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}


def benchmark_rows(name: str, path: str | Path | None = None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(id, turns) of each row of one of `BENCHMARKS`, in the hub's order.

    `path` is a local JSONL file in place of the hub: rows in the hub's fields, or with `turns`, used as they are.

    Raises:
        MoexpError: an unreachable hub, a missing file or field, missing exemplars.
    """
    benchmark = BENCHMARKS[name]
    file = None if path is None else _file(benchmark, Path(path).expanduser())
    rows = _hub_rows(benchmark, benchmark.hub) if file is None else json_rows(file)
    before: str | None = None
    for number, (where, row) in enumerate(rows, start=1):
        turns = benchmark.turns(row, where)
        if TURNS not in row:
            if before is None:
                before = _exemplars(benchmark, file)
            turns = (before + turns[0], *turns[1:])
        yield f"{name}-{pick_id(row, (benchmark.id_field or QUESTION_ID, QUESTION_ID), number)}", turns


def _exemplars(benchmark: Benchmark, file: Path | None) -> str:
    """What stands before every question: from the hub with the hub's rows, from beside `file` with a local copy's."""
    exemplars = benchmark.exemplars
    if exemplars is None:
        return ""
    rows: Iterable[tuple[str, Row]]
    if file is None:
        source, rows = exemplars.hub, _hub_rows(benchmark, exemplars.hub)
    else:
        beside = file.with_name(exemplars.file)
        source = str(beside)
        if not beside.is_file():
            raise MoexpError(
                f"{benchmark.name} needs {exemplars.count} answered exemplars and there is no {exemplars.file}",
                where=source,
                valid=f"the train split beside {file.name}, or rows with {TURNS}",
            )
        rows = json_rows(beside)
    shown = [
        "".join(benchmark.turns(row, where)) + " " + "".join(pick_texts(row, (exemplars.answer,), where))
        for where, row in itertools.islice(rows, exemplars.count)
    ]
    if len(shown) < exemplars.count:
        raise MoexpError(f"{len(shown)} exemplars", where=source, valid=f"{exemplars.count} rows or more")
    return "".join(f"{one}\n\n" for one in shown)


def _file(benchmark: Benchmark, path: Path) -> Path:
    if not path.is_file():
        fields = " or ".join((*benchmark.fields, TURNS))
        raise MoexpError(f"no such file for {benchmark.name}", where=str(path), valid=f"JSONL with {fields}")
    return path


def _hub_rows(benchmark: Benchmark, location: str) -> Iterator[tuple[str, Row]]:
    try:
        yield from hub_rows(location, prefer=(), streaming=benchmark.streaming, drop=benchmark.drop)
    except MoexpError as error:
        name = benchmark.name
        local = f"{name}=path/to/{name}.jsonl with {' or '.join((*benchmark.fields, TURNS))}"
        if benchmark.exemplars:
            local += f" and {benchmark.exemplars.file} beside it"
        raise MoexpError(
            f"cannot load the benchmark {name}: {error.what}",
            where=error.where,
            valid=f"a hub this machine can reach, or a local copy: {local}",
        ) from error
