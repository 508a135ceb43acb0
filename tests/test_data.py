"""Sources of prompts and texts: local formats, hub datasets, error lines, chat rendering."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moexp.base.errors import MoexpError
from moexp.base.hub import parse_location
from moexp.data.machine_text import machine_texts
from moexp.data.prompts import Prompt, load_prompts, load_texts, render_chat


def write_jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# One row in the layout of each public prompt set, and what must come out of it.
LAYOUTS = [
    ("gsm8k", {"question": "How many?", "answer": "#### 3"}, "gsm8k-1", ("How many?",)),
    (
        "humaneval",
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():\n",
            "entry_point": "f",
            "canonical_solution": "",
            "test": "",
        },
        "humaneval-HumanEval/0",
        ("def f():\n",),
    ),
    ("mbpp", {"turns": ["Write f."]}, "mbpp-1", ("Write f.",)),
    ("mt-bench", {"turns": ["Write a post.", "Shorten it."]}, "mt-bench-1", ("Write a post.", "Shorten it.")),
    (
        "alpaca80",
        {"question_id": 0, "category": "", "turns": ["Name a fruit."], "reference": ["Plum"]},
        "alpaca80-0",
        ("Name a fruit.",),
    ),
    (
        "spec_bench",
        {"question_id": 81, "category": "writing", "turns": ["One", "Two"]},
        "spec_bench-81",
        ("One", "Two"),
    ),
    (
        "alpaca",
        {"instruction": "Translate.", "input": "Good day", "output": "Bonjour"},
        "alpaca-1",
        ("Translate.\n\nGood day",),
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        "messages-1",
        ("Hi",),
    ),
]


@pytest.mark.parametrize(("stem", "row", "prompt_id", "turns"), LAYOUTS, ids=[row[0] for row in LAYOUTS])
def test_local_layouts(tmp_path: Path, stem: str, row: dict[str, Any], prompt_id: str, turns: tuple[str, ...]) -> None:
    source = write_jsonl(tmp_path / f"{stem}.jsonl", row)
    assert load_prompts(source) == [Prompt(prompt_id, stem, turns)]


def test_named_field_limit_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "a", "other": "x"}\n\n{"question": "b", "other": "y"}\n', encoding="utf-8")
    assert [prompt.turns for prompt in load_prompts(f"{path}#other")] == [("x",), ("y",)]
    assert [prompt.turns for prompt in load_prompts(str(path), limit=1)] == [("a",)]


def test_limit_stops_reading_early(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "a"}\nnot json\n', encoding="utf-8")
    assert len(load_prompts(str(path), limit=1)) == 1


def error_of(source: str, limit: int | None = None) -> str:
    with pytest.raises(MoexpError) as caught:
        load_prompts(source, limit)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_error_lines(tmp_path: Path) -> None:
    bad_json = tmp_path / "bad.jsonl"
    bad_json.write_text('{"turns": ["a"]}\n{"turns": \n', encoding="utf-8")
    assert f"{bad_json}:2" in error_of(str(bad_json)) and "not JSON" in error_of(str(bad_json))
    assert "not a JSON object" in error_of(write_jsonl(tmp_path / "list.jsonl", [1, 2]))
    missing = error_of(write_jsonl(tmp_path / "fields.jsonl", {"title": "t", "body": "b"}))
    assert "title, body" in missing and "fields.jsonl:1" in missing
    named = error_of(f"{tmp_path / 'fields.jsonl'}#text")
    assert "no field 'text'" in named and "title, body" in named
    assert "holds no text" in error_of(write_jsonl(tmp_path / "number.jsonl", {"prompt": 3}))
    assert "empty prompt" in error_of(write_jsonl(tmp_path / "empty.jsonl", {"prompt": "  "}))
    assert "no prompts" in error_of(write_jsonl(tmp_path / "none.jsonl"))
    assert "no such file" in error_of(str(tmp_path / "absent.jsonl"))
    assert "chat, math, code, summary, instruct" in error_of("chta")
    assert "positive" in error_of("chat", 0)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in error_of(str(binary))


class FakeHub:
    """Stands for the `datasets` package: answers with rows, or raises."""

    def __init__(self, answer: Any, offline: bool = True) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []
        self.offline_seen: list[bool] = []
        self.config = SimpleNamespace(HF_HUB_OFFLINE=offline)

    def load_dataset(self, repo: str, config: str | None, *, split: str | None, streaming: bool) -> Any:
        self.calls.append((repo, config, split, streaming))
        self.offline_seen.append(self.config.HF_HUB_OFFLINE)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(answer: Any, offline: bool = True) -> FakeHub:
        hub = FakeHub(answer, offline)
        monkeypatch.setitem(sys.modules, "datasets", hub)
        return hub

    return install


def test_hub_prompts(fake_hub: Any) -> None:
    hub = fake_hub([{"question": "a"}, {"question": "b"}])
    prompts = load_prompts("hf:openai/gsm8k:main:test#question", limit=1)
    assert prompts == [Prompt("gsm8k-1", "gsm8k", ("a",))]
    assert hub.calls == [("openai/gsm8k", "main", "test", False)]


def test_hub_without_a_split_prefers_test_for_prompts_and_train_for_texts(fake_hub: Any) -> None:
    fake_hub({"train": [{"text": "t", "prompt": "p"}], "test": [{"text": "u", "prompt": "q"}]})
    assert load_prompts("hf:some/set")[0].turns == ("q",)
    assert list(load_texts("hf:some/set")) == ["t"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the hub\nsecond line"),
        FileNotFoundError("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."),
        PermissionError("Dataset 'a/b' is a gated dataset on the Hub."),
        ValueError('Unknown split "tset". Should be one of [...]'),
    ],
)
def test_hub_failures_are_one_line(fake_hub: Any, error: Exception) -> None:
    fake_hub(error)
    message = error_of("hf:a/b:tset")
    assert "hf:a/b:tset" in message and str(error).splitlines()[0].rstrip(".") in message
    assert "second line" not in message


def test_an_unreachable_hub_is_noticed_before_the_client_retries(
    fake_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    hub = fake_hub(ConnectionError("offline"), offline=False)
    assert "offline" in error_of("hf:a/b")
    assert hub.offline_seen == [True]
    assert hub.config.HF_HUB_OFFLINE is False and constants.HF_HUB_OFFLINE is False  # put back


@pytest.mark.parametrize(
    ("location", "parsed"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b:main", ("a/b", "main", None)),
        ("a/b:test", ("a/b", None, "test")),
        ("a/b:train[:10%]", ("a/b", None, "train[:10%]")),
        ("a/b:validation[5]", ("a/b", None, "validation[5]")),
        ("a/b:main:test", ("a/b", "main", "test")),
        ("a/b::test", ("a/b", None, "test")),
        (":main", None),
        ("a/b:c:d:e", None),
    ],
)
def test_hub_locations(location: str, parsed: tuple[str, str | None, str | None] | None) -> None:
    if parsed is None:
        with pytest.raises(MoexpError, match="malformed"):
            parse_location(location)
    else:
        assert parse_location(location) == parsed


def test_texts_of_local_files(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    long_paragraph = "word " * 500
    (tmp_path / "book.txt").write_text(f"One.\nStill one.\n\n\nTwo.\n\n{long_paragraph}\n\nLast.\n", encoding="utf-8")
    chunks = list(load_texts(str(tmp_path / "book.txt")))
    assert chunks[0].startswith("One.\nStill one.\n\nTwo.\n\nword") and chunks[1:] == ["Last."]

    source = write_jsonl(tmp_path / "rows.jsonl", {"text": "a", "note": "n"}, {"text": ""}, {"text": "b"})
    assert list(load_texts(source)) == ["a", "b"]

    parquet.write_table(pa.table({"content": ["x", "y"], "n": [1, 2]}), tmp_path / "rows.parquet")
    assert list(load_texts(str(tmp_path / "rows.parquet"))) == ["x", "y"]
    with pytest.raises(MoexpError, match="content, n"):
        next(load_texts(f"{tmp_path / 'rows.parquet'}#body"))

    (tmp_path / "torn.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-20])
    for name, reason in [
        ("torn.parquet", "Parquet"),
        ("absent.txt", "no such file"),
        ("book.pdf", "this kind"),
    ]:
        if name == "book.pdf":
            (tmp_path / name).touch()
        with pytest.raises(MoexpError, match=reason):
            next(load_texts(str(tmp_path / name)))


MODULE = '''"""The module says what it is for."""
# Twelve words are the least that a comment needs to count as
# prose here, and this one has some more than that.

def f():
    """Return nothing."""
    # too short
    return """
# a comment inside of a string is no comment, however many words it may have in it
"""
'''


def test_machine_texts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "b.py").write_text(MODULE + '\ndef g():\n    """Only here."""\n', encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (:\n", encoding="utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text('"""Not read."""\n', encoding="utf-8")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The if\\n\\nstatement'}\n", encoding="utf-8")
    texts = list(machine_texts(tmp_path))
    assert texts == list(machine_texts(tmp_path))
    everything = "\n\n".join(texts)
    comment = "to count as\nprose here, and this one has some more than that."
    assert everything.count("The module says") == 1  # repeated pieces come once
    assert everything.count(comment) == 1 and everything.count("Only here.") == 1
    assert "The if\n\nstatement" in everything
    assert "too short" not in everything and "Not read" not in everything and "inside of a string" not in everything


def test_machine_texts_of_this_python(tmp_path: Path) -> None:
    first = next(load_texts("machine"))
    assert first == next(load_texts("machine")) and len(first.split()) > 20
    with pytest.raises(MoexpError, match="no Python sources"):
        next(machine_texts(tmp_path))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<user>", "<assistant>", "hi", "hello", "bye", "User:", "Assistant:", "[UNK]"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(("template", "expected"), [(TEMPLATE, "<user> hi <assistant>"), (None, "User: hi Assistant:")])
def test_render_chat(tokenizer: Any, template: str | None, expected: str) -> None:
    tokenizer.chat_template = template
    ids = render_chat(tokenizer, Prompt("p", "chat", ("hi", "bye")))
    assert isinstance(ids, list) and all(type(token) is int for token in ids)
    assert tokenizer.convert_ids_to_tokens(ids) == expected.split()
