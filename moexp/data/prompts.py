"""Prompt sets and text corpora: those in the package, local files, the hub, and the text every machine has.

A source is a string, the same everywhere (recipes, flags, Python):

    chat | math | code | summary | instruct      one embedded evaluation workload
    embedded                                     all five, interleaved
    tune                                         prompts set aside for choosing hyper-parameters
    path/to/file.jsonl[#field]                   local prompts, one JSON object a line
    hf:repo[:config][:split][#field]             a hub dataset
    gsm8k | humaneval | aime25 | math500 | amc22-24 | mt-bench | mmstar | mbpp | alpaca | cnn-dm
                                                 (prompts only) a public benchmark with its prompt, from the hub
    gsm8k=path/to/gsm8k_test.jsonl               the same from a local file, in the hub's fields or with `turns`
    machine                                      (texts only) documentation of Python's standard library
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moexp.base.errors import MoexpError
from moexp.base.hub import hub_rows
from moexp.data.json_rows import json_rows, pick_id, pick_texts
from moexp.data.machine_text import join_chunks, machine_texts
from moexp.data.public_sets import BENCHMARKS, benchmark_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORKLOADS = ("chat", "math", "code", "summary", "instruct")
PROMPT_FIELDS = ("turns", "question", "prompt", "instruction", "messages")
TEXT_FIELDS = ("text", "content", "document", "article")
TEXT_FILES = ".txt, .jsonl, .parquet"
ID_FIELDS = ("id", "question_id", "task_id")
NAMES = (*WORKLOADS, "embedded", "tune", *BENCHMARKS)


@dataclass(frozen=True)
class Prompt:
    """One request. `turns` are the user's messages in order; `workload` is the group it is reported under."""

    id: str
    workload: str
    turns: tuple[str, ...]


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """Prompts of a source (see the module's docstring), in a fixed order, the first `limit`.

    Without `#field` the text comes from the first of `PROMPT_FIELDS` a row has. Any prefix of `embedded` is balanced
    over the workloads.

    Raises:
        MoexpError: unknown name, missing file, line that is not JSON, missing field, unreadable dataset.
    """
    if limit is not None and limit < 1:
        raise MoexpError("the number of prompts must be positive", where=f"{source}, limit {limit}")
    name, equals, path = source.partition("=")
    if source == "embedded":
        by_workload = [_embedded(name) for name in WORKLOADS]
        rounds = itertools.zip_longest(*by_workload)
        prompts: Iterable[Prompt] = (prompt for round_ in rounds for prompt in round_ if prompt)
    elif source in (*WORKLOADS, "tune"):
        prompts = _embedded(source)
    elif name in BENCHMARKS:
        rows = benchmark_rows(name, path if equals else None)
        prompts = (Prompt(row_id, name, turns) for row_id, turns in rows)
    else:
        prompts = _external_prompts(source)
    loaded = list(itertools.islice(prompts, limit))
    if not loaded:
        raise MoexpError("no prompts in it", where=source)
    return loaded


def load_texts(source: str) -> Iterator[str]:
    """Plain texts of a corpus, one at a time.

    `source` is `machine`, a .txt (paragraphs joined to chunks), .jsonl or .parquet file, or a hub dataset (streamed).
    Without `#field` the text comes from the first of `TEXT_FIELDS` a row has.

    Raises:
        MoexpError: as `load_prompts`; raised with the first text.
    """
    if source == "machine":
        yield from machine_texts()
        return
    rows: Iterable[tuple[str, Mapping[str, Any]]]
    location, field = _split_field(source)
    if source.startswith("hf:"):
        rows = hub_rows(location.removeprefix("hf:"), prefer=("train",), streaming=True)
    else:
        path = _existing(location, valid=f"machine, a file ({TEXT_FILES}), or hf:repo[:config][:split][#field]")
        if path.suffix == ".txt":
            yield from join_chunks(_paragraphs(path))
            return
        if path.suffix == ".parquet":
            rows = _parquet_rows(path)
        elif path.suffix in (".jsonl", ".json"):
            rows = json_rows(path)
        else:
            raise MoexpError("cannot read texts from this kind of file", where=location, valid=TEXT_FILES)
    for where, row in rows:
        text = "\n\n".join(pick_texts(row, (field,) if field else TEXT_FIELDS, where))
        if text:
            yield text


def render_chat(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt's first turn in the model's chat format, ending where the assistant is to answer.

    A tokenizer without a chat template gets plain `User:` / `Assistant:` lines.
    """
    messages = [{"role": "user", "content": prompt.turns[0]}]
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return cast(list[int], ids)
    return tokenizer.encode(f"User: {prompt.turns[0]}\nAssistant:")


def _embedded(name: str) -> list[Prompt]:
    text = resources.files("moexp.data").joinpath("workloads", f"{name}.jsonl").read_text(encoding="utf-8")
    rows = map(json.loads, text.splitlines())
    return [Prompt(row["id"], row["workload"], tuple(row["turns"])) for row in rows]


def _external_prompts(source: str) -> Iterator[Prompt]:
    location, field = _split_field(source)
    if location.startswith("hf:"):
        repo = location.removeprefix("hf:")
        rows = hub_rows(repo, prefer=("test", "validation", "train"), streaming=False)
        name = repo.split(":")[0].split("/")[-1]
    else:
        close = get_close_matches(location.partition("=")[0], NAMES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        kinds = "BENCHMARK=FILE.jsonl, a .jsonl file, or hf:repo[:config][:split][#field]"
        path = _existing(location, valid=f"{hint}{', '.join(NAMES)}, {kinds}")
        rows, name = json_rows(path), path.stem
    for number, (where, row) in enumerate(rows, start=1):
        turns = pick_texts(row, (field,) if field else PROMPT_FIELDS, where)
        if not any(turn.strip() for turn in turns):
            raise MoexpError("empty prompt", where=where)
        if row.get("input") and turns == (row.get("instruction"),):  # the Alpaca layout
            turns = (f"{turns[0]}\n\n{row['input']}",)
        yield Prompt(f"{name}-{pick_id(row, ID_FIELDS, number)}", name, turns)


def _split_field(source: str) -> tuple[str, str | None]:
    location, _, field = source.partition("#")
    return location, field or None


def _existing(location: str, *, valid: str) -> Path:
    path = Path(location).expanduser()
    if path.is_file():
        return path
    # A bare word was meant as a name, on its own or before a file; anything else as a path.
    word = Path(location.partition("=")[0])
    is_name = word.suffix == "" and word.name == str(word)
    raise MoexpError("unknown source" if is_name else "no such file", where=location, valid=valid)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from ((str(path), row) for row in batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise MoexpError("not a readable Parquet file", where=str(path)) from error


def _paragraphs(path: Path) -> Iterator[str]:
    """Blocks between blank lines, read line by line."""
    with path.open(encoding="utf-8") as lines:
        try:
            for blank, block in itertools.groupby(lines, key=str.isspace):
                if not blank:
                    yield "".join(block).strip("\n")
        except UnicodeDecodeError as error:
            raise MoexpError("not UTF-8 text", where=str(path)) from error
