"""The embedded prompts: evaluation, tuning and training sets, and that training never meets evaluation."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from importlib import resources
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.data.prompts import (
    WORKLOADS,
    OverlapGuard,
    Prompt,
    load_prompts,
    normalised_words,
    training_prompts,
    word_runs,
)
from moexp.data.templates import TOKEN, Template, Templates


def workload_file(name: str) -> str:
    return (resources.files("moexp.data") / "workloads" / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def templates() -> Templates:
    return Templates.parse(workload_file("seed_templates.yaml"))


@pytest.fixture(scope="module")
def held_out() -> list[Prompt]:
    return [*load_prompts("embedded"), *load_prompts("tune")]


@pytest.fixture(scope="module")
def trained() -> list[Prompt]:
    return list(itertools.islice(training_prompts(0), 3000))


@pytest.mark.parametrize("name", [*WORKLOADS, "tune", "seeds"])
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


def test_tune_and_seeds_cover_every_kind() -> None:
    assert Counter(prompt.workload for prompt in load_prompts("tune")) == dict.fromkeys(WORKLOADS, 4)
    seeds = [json.loads(line)["workload"] for line in workload_file("seeds.jsonl").splitlines()]
    assert Counter(seeds) == dict.fromkeys(WORKLOADS, 50)


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


def test_training_never_meets_evaluation(held_out: list[Prompt], trained: list[Prompt]) -> None:
    for length in (13, 8):
        runs = {run for prompt in held_out for turn in prompt.turns for run in word_runs(turn, length)}
        for prompt in trained:
            assert runs.isdisjoint(word_runs(prompt.turns[0], length)), prompt
    texts = {tuple(normalised_words(turn)) for prompt in held_out for turn in prompt.turns}
    assert not [prompt for prompt in trained if tuple(normalised_words(prompt.turns[0])) in texts]


def test_no_seed_is_dropped_for_overlap(held_out: list[Prompt], trained: list[Prompt]) -> None:
    guard = OverlapGuard(held_out)
    seeds = [json.loads(line)["turns"][0] for line in workload_file("seeds.jsonl").splitlines()]
    assert not [seed for seed in seeds if guard.overlaps(seed)]
    assert set(seeds) <= {prompt.turns[0] for prompt in trained}


def test_training_prompts_are_deterministic_varied_and_balanced(trained: list[Prompt]) -> None:
    again = list(itertools.islice(training_prompts(0), 300))
    assert again == trained[:300]
    other = list(itertools.islice(training_prompts(1), 300))
    assert [prompt.turns for prompt in other] != [prompt.turns for prompt in again]
    assert len({prompt.turns for prompt in trained}) == len({prompt.id for prompt in trained}) == len(trained)
    assert Counter(prompt.workload for prompt in trained) == dict.fromkeys(WORKLOADS, len(trained) // 5)


def test_training_keeps_away_from_further_sets(trained: list[Prompt]) -> None:
    victim = next(prompt for prompt in trained[:500] if prompt.workload == "chat" and len(prompt.turns[0].split()) > 9)
    kept = itertools.islice(training_prompts(0, exclude=[victim]), 500)
    assert victim.turns not in {prompt.turns for prompt in kept}


def test_excluding_everything_is_an_error() -> None:
    with pytest.raises(MoexpError, match="nothing to train on"):
        list(itertools.islice(training_prompts(0, exclude=[Prompt("x", "chat", ("a",))] + PUNCTUATION), 4000))


# Every template of `math` holds one of these words, so that no word problem can pass.
PUNCTUATION = [Prompt(word, "math", (word,)) for word in ("how", "what", "when")]


@given(data=st.data())
def test_the_guard_finds_any_shared_run(data: st.DataObject) -> None:
    prompt = data.draw(st.sampled_from(load_prompts("summary")))
    words = prompt.turns[0].split()
    start = data.draw(st.integers(0, len(words) - 8))
    text = "Please " + " ".join(words[start : start + 8]).upper() + ", and more."
    # Words joined by an apostrophe or hyphen count as two, so eight words are at least eight.
    assert OverlapGuard([prompt]).overlaps(text)
    unrelated = " ".join(f"w{number}" for number in range(20))
    assert not OverlapGuard([prompt]).overlaps(unrelated + " " + " ".join(words[start : start + 3]))


def test_the_guard_compares_short_texts_whole() -> None:
    guard = OverlapGuard(
        [Prompt("a", "chat", ("Why do cats purr?", "Tell me more about the small ones, my friend, please."))]
    )
    assert guard.overlaps("why do CATS purr") and guard.overlaps("So, why do cats purr when they are asleep at night?")
    assert guard.overlaps("the small ones") and not guard.overlaps("Why do cats meow?")


def test_templates_are_rich_enough(templates: Templates) -> None:
    assert set(templates.kinds) == set(WORKLOADS)
    assert len(templates.kinds["math"]) >= 15 and len(templates.passages) >= 12
    assert len(templates.slots["topic"]) >= 100 and len(templates.slots["code_task"]) >= 60
    for name, values in templates.slots.items():
        assert len(set(values)) == len(values), name
    for kind in WORKLOADS:
        rng = Random(1)
        drawn = [templates.draw(kind, rng) for _ in range(600)]
        assert len(set(drawn)) > 500, kind
        for text in drawn:
            article = re.search(r"\b[Aa] [aeio]\w+|\b[Aa]n [^aeiou\W]\w+", text)
            assert not article or article[0] in ("a one", "an hour", "an f"), text
            assert kind == "code" or not re.search(r"[{}#]|  | [,.?]", text), text
    assert all(3 <= sum("" not in position for position in frame) <= len(frame) <= 6 for frame in templates.passages)


def test_every_slot_is_defined_and_used(templates: Templates) -> None:
    used: set[str] = {"passage"}
    for kind in templates.kinds.values():
        for template in kind:
            named = slots_of(template.text)
            assert set(template.numbers) <= named | set(re.findall(r"\w+", repr(template.numbers))), template
            used |= named - set(template.numbers)
    for text in itertools.chain(*templates.slots.values(), *itertools.chain(*templates.passages)):
        used |= slots_of(text)
    assert used - {"p", "q", "r"} == set(templates.slots) | {"passage"}


def slots_of(text: str) -> set[str]:
    return {match[1][0].lower() + match[1][1:] for match in TOKEN.finditer(text) if match[1]}


def test_expansion_rules() -> None:
    templates = Templates(
        kinds={"k": (Template("{Fruit} {fruit} {fruit#2} {{{n}}} {m} {nested}", {"n": [2, 6, 2], "m": "n*3+n*n"}),)},
        slots={"fruit": ("plum", "fig"), "nested": ("[{fruit#2}]",)},
        passages=((("x",),),),
    )
    seen = set()
    for seed in range(40):
        first, same, second, n, m, nested = templates.draw("k", Random(seed)).split()
        assert first == same.capitalize() and {same, second} == {"plum", "fig"} and nested == f"[{second}]"
        number = int(n.strip("{}"))
        assert n == f"{{{number}}}" and int(m) == number * 3 + number**2
        seen.add(number)
    assert seen == {2, 4, 6}
