"""The papers' benchmarks: the exact prompt of each, GSM8K's exemplars, local copies, and error lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moexp.base.errors import MoexpError
from moexp.bench.jobs import select_prompts
from moexp.data.prompts import Prompt, load_prompts
from moexp.data.public_sets import BENCHMARKS

BOXED = "\n Please reason step by step, and put your final answer within \\boxed{}."

# A row as the hub has it, and the id and turns that must come of it.
GOLDEN: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    (
        "humaneval",
        {"task_id": "HumanEval/0", "prompt": 'def f():\n    """Say hi."""\n', "entry_point": "f", "test": ""},
        "humaneval-HumanEval/0",
        ('def f():\n    """Say hi."""\n',),
    ),
    ("aime25", {"problem": "Find $x$.", "answer": "70", "id": "0"}, "aime25-0", ("Find $x$." + BOXED,)),
    ("aime25", {"question": "Find {text}.", "answer": "70"}, "aime25-1", ("Find {text}." + BOXED,)),
    (
        "math500",
        {"problem": "What is $1+1$?", "solution": "", "answer": "2", "level": 1, "unique_id": "test/algebra/1.json"},
        "math500-test/algebra/1.json",
        ("Problem:\n What is $1+1$?\n\n Solution:",),
    ),
    (
        "amc22-24",
        {"id": 3, "problem": "How many?", "answer": 142.0, "url": ""},
        "amc22-24-3",
        ("Problem:\n How many?\n\n Solution:",),
    ),
    (
        "mt-bench",
        {"category": "writing", "prompt": ["Write a post.", "Shorten it."], "reference": [], "prompt_id": 36},
        "mt-bench-36",
        ("Write a post.", "Shorten it."),
    ),
    (
        "mmstar",
        {"index": 0, "question": "Which one?\nOptions: A: this, B: that", "answer": "A", "category": ""},
        "mmstar-0",
        ("Which one?\nOptions: A: this, B: that",),
    ),
    (
        "mbpp",
        {"task_id": 2, "prompt": "Write a function.", "code": "", "test_list": []},
        "mbpp-2",
        ("Write a function.",),
    ),
    (
        "alpaca",
        {"instruction": "Translate.", "input": "Good day", "output": "Bonjour", "text": "Below is an instruction"},
        "alpaca-1",
        ("Translate.\n\nGood day",),
    ),
    ("alpaca", {"instruction": "Name a fruit.", "input": "", "output": "Plum"}, "alpaca-1", ("Name a fruit.",)),
    ("cnn-dm", {"article": "It rained.", "highlights": "Rain.", "id": "a1"}, "cnn-dm-a1", ("Summarize: It rained.",)),
]
# Where each is on the hub: repository, config, split.
SETS: dict[str, tuple[str, str | None, str]] = {
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "aime25": ("math-ai/aime25", None, "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "amc22-24": ("AI-MO/aimo-validation-amc", None, "train"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "mmstar": ("Lin-Chen/MMStar", None, "val"),
    "mbpp": ("google-research-datasets/mbpp", "sanitized", "test"),
    "alpaca": ("tatsu-lab/alpaca", None, "train"),
    "cnn-dm": ("abisee/cnn_dailymail", "3.0.0", "test"),
}
SHOTS = [{"question": f"Q{n}?", "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n}"} for n in range(7)]
QUESTION = {"question": "How many?", "answer": "#### 3"}
FIVE_SHOT = (
    "Question: Q0?\nAnswer: <<0+0=0>>\n#### 0\n\n"
    "Question: Q1?\nAnswer: <<1+1=2>>\n#### 2\n\n"
    "Question: Q2?\nAnswer: <<2+2=4>>\n#### 4\n\n"
    "Question: Q3?\nAnswer: <<3+3=6>>\n#### 6\n\n"
    "Question: Q4?\nAnswer: <<4+4=8>>\n#### 8\n\n"
    "Question: How many?\nAnswer:"
)


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def error_of(source: str) -> str:
    with pytest.raises(MoexpError) as caught:
        load_prompts(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Any, Any]], list[tuple[Any, ...]]]:
    """Installs data sets by (repository, config, split), in place of the network; gives the list of those opened."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def install(sets: dict[Any, Any]) -> list[tuple[Any, ...]]:
        opened: list[tuple[Any, ...]] = []

        def load_dataset(repo: str, config: str | None, *, split: str | None, streaming: bool) -> Any:
            opened.append((repo, config, split))
            return sets[repo, config, split]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return opened

    return install


# --- prompts ---


@pytest.mark.parametrize(("name", "row", "prompt_id", "turns"), GOLDEN, ids=[row[0] for row in GOLDEN])
def test_the_prompt_of_a_row(
    tmp_path: Path, name: str, row: dict[str, Any], prompt_id: str, turns: tuple[str, ...]
) -> None:
    path = write_jsonl(tmp_path / "any-name.jsonl", row)
    assert load_prompts(f"{name}={path}") == [Prompt(prompt_id, name, turns)]


def test_every_benchmark_has_a_golden_prompt() -> None:
    assert {row[0] for row in GOLDEN} | {"gsm8k"} == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_turns_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / "copy.jsonl", {"turns": ["One", "Two"]}, {"turns": ["Three"], "question_id": 7})
    assert load_prompts(f"{name}={path}") == [
        Prompt(f"{name}-1", name, ("One", "Two")),
        Prompt(f"{name}-7", name, ("Three",)),
    ]


def test_gsm8k_has_five_exemplars_of_the_train_file_before_the_question(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k_train.jsonl", *SHOTS)
    path = write_jsonl(tmp_path / "gsm8k_test.jsonl", QUESTION, QUESTION)
    assert load_prompts(f"gsm8k={path}") == [Prompt(f"gsm8k-{n}", "gsm8k", (FIVE_SHOT,)) for n in (1, 2)]


def test_prompts_of_benchmarks_mix_with_embedded_ones(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mbpp.jsonl", *({"turns": [str(n)]} for n in range(3)))
    prompts = select_prompts(["chat", f"mbpp={path}"], 2)
    assert [prompt.workload for prompt in prompts] == ["chat", "mbpp", "chat", "mbpp"]


# --- the hub ---


@pytest.mark.parametrize(("name", "row", "prompt_id", "turns"), GOLDEN, ids=[row[0] for row in GOLDEN])
def test_the_hub_gives_the_same_prompt(
    hub: Any, name: str, row: dict[str, Any], prompt_id: str, turns: tuple[str, ...]
) -> None:
    from datasets import Dataset, Image

    data = Dataset.from_list([{**row, "image": {"bytes": b"no image at all", "path": None}}])
    opened = hub({SETS[name]: data.cast_column("image", Image()) if name == "mmstar" else data})
    assert load_prompts(name) == [Prompt(prompt_id, name, turns)]
    assert opened == [SETS[name]]


def test_gsm8k_of_the_hub_takes_its_exemplars_from_train(hub: Any) -> None:
    opened = hub({("openai/gsm8k", "main", "test"): [QUESTION], ("openai/gsm8k", "main", "train"): SHOTS})
    assert load_prompts("gsm8k") == [Prompt("gsm8k-1", "gsm8k", (FIVE_SHOT,))]
    assert opened == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]


def test_without_a_hub_the_error_names_the_benchmark_and_a_local_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub\nsecond line")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = error_of("mmstar")
    assert message.startswith("cannot load the benchmark mmstar: ") and "Couldn't reach the hub" in message
    assert "hf:Lin-Chen/MMStar:val" in message and "mmstar=path/to/mmstar.jsonl with question or turns" in message
    assert "gsm8k_train.jsonl beside it" in error_of("gsm8k")


# --- mistakes ---


def test_missing_exemplars_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "gsm8k_test.jsonl", QUESTION)
    message = error_of(f"gsm8k={path}")
    assert "gsm8k needs 5 answered exemplars" in message and str(tmp_path / "gsm8k_train.jsonl") in message
    write_jsonl(tmp_path / "gsm8k_train.jsonl", *SHOTS[:4])
    assert "4 exemplars" in error_of(f"gsm8k={path}") and "5 rows or more" in error_of(f"gsm8k={path}")
    write_jsonl(tmp_path / "gsm8k_train.jsonl", *({"question": "Q?"} for _ in range(5)))
    assert "no field 'answer'" in error_of(f"gsm8k={path}")


def test_error_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", {"problem": "Find x."}, {"title": "t", "body": "b"})
    message = error_of(f"math500={path}")
    assert "no field 'turns' or 'problem'" in message and "rows.jsonl:2" in message and "title, body" in message
    assert "holds no text" in error_of(f"math500={write_jsonl(tmp_path / 'number.jsonl', {'problem': 3})}")
    assert "empty prompt" in error_of(f"math500={write_jsonl(tmp_path / 'empty.jsonl', {'problem': ' '})}")
    assert "no prompts" in error_of(f"math500={write_jsonl(tmp_path / 'none.jsonl')}")
    assert "no such file for math500" in error_of(f"math500={tmp_path / 'absent.jsonl'}")
    assert "no such file for math500" in error_of("math500=")


@pytest.mark.parametrize("source", ["gsmk8", "gsmk8=copy.jsonl"])
def test_a_typo_names_the_nearest_and_all(source: str) -> None:
    message = error_of(source)
    assert f"unknown source ({source})" in message and "did you mean gsm8k? " in message
    assert all(name in message for name in (*BENCHMARKS, "chat", "embedded"))


def test_an_equals_sign_in_a_path_is_no_benchmark(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "lr=3.jsonl", {"prompt": "Hi"})
    assert load_prompts(str(path)) == [Prompt("lr=3-1", "lr=3", ("Hi",))]
