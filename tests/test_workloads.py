"""The embedded prompts: evaluation and tuning sets, which do not repeat each other."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import resources

import pytest

from moexp.data.prompts import WORKLOADS, Prompt, load_prompts


def workload_file(name: str) -> str:
    return (resources.files("moexp.data") / "workloads" / name).read_text(encoding="utf-8")


def word_runs(text: str, length: int) -> set[str]:
    """All runs of `length` lower-case words in a text."""
    words = re.findall(r"\w+", text.casefold())
    return {" ".join(words[start : start + length]) for start in range(len(words) - length + 1)}


@pytest.fixture(scope="module")
def held_out() -> list[Prompt]:
    return [*load_prompts("embedded"), *load_prompts("tune")]


@pytest.mark.parametrize("name", [*WORKLOADS, "tune"])
def test_files_hold_the_declared_fields(name: str) -> None:
    rows = [json.loads(line) for line in workload_file(f"{name}.jsonl").splitlines()]
    for row in rows:
        assert set(row) == {"id", "workload", "turns"}
        assert row["workload"] in WORKLOADS
        assert row["turns"] and all(turn == turn.strip() and turn for turn in row["turns"])
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({tuple(row["turns"]) for row in rows}) == len(rows)


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_is_large_enough_and_short_enough(name: str) -> None:
    prompts = load_prompts(name)
    assert len(prompts) >= 20 and {prompt.workload for prompt in prompts} == {name}
    # Everything but a passage is short: the model that answers is small.
    most_words = 200 if name == "summary" else 70
    assert max(len(turn.split()) for prompt in prompts for turn in prompt.turns) <= most_words


def test_summaries_come_with_a_passage() -> None:
    tune = [prompt for prompt in load_prompts("tune") if prompt.workload == "summary"]
    for prompt in [*load_prompts("summary"), *tune]:
        request, passage = prompt.turns[0].split("\n\n")
        assert 90 <= len(passage.split()) <= 160 and len(request.split()) < 20, prompt.id


def test_tune_covers_every_kind() -> None:
    assert Counter(prompt.workload for prompt in load_prompts("tune")) == dict.fromkeys(WORKLOADS, 4)


def test_any_prefix_of_embedded_is_balanced() -> None:
    for limit in (1, 7, 20):
        counts = Counter(prompt.workload for prompt in load_prompts("embedded", limit))
        assert sum(counts.values()) == limit and max(counts.values()) - min(counts.values()) <= 1
    assert len(load_prompts("embedded")) == sum(len(load_prompts(name)) for name in WORKLOADS)


def test_held_out_prompts_do_not_repeat_each_other(held_out: list[Prompt]) -> None:
    seen: dict[str, str] = {}
    for prompt in held_out:
        for run in {run for turn in prompt.turns for run in word_runs(turn, 8)}:
            assert seen.setdefault(run, prompt.id) == prompt.id, run
