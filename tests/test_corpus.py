from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moexp.base.errors import MoexpError
from moexp.config.target import CorpusSection
from moexp.learn.corpus.files import Author, corpus_rows, load_rows, save_rows, shipped_corpora, write_corpus
from moexp.learn.corpus.streams import Part, Script, chat_frame, scripts, write_streams
from moexp.target.tiny import byte_tokenizer
from tests.tiny_models import dense_model, random_rows

END = 250


@pytest.fixture(scope="module")
def model() -> Any:
    return dense_model()


def counted(taken: list[int]) -> Iterator[Script]:
    for number in itertools.count():
        taken.append(number)
        yield (Part((number % 40 + 100, 60), 3), Part((61,), 2), Part((62,), 0))


def test_a_stream_is_its_scripts_with_the_models_words_between(model: Any):
    taken: list[int] = []
    streams = write_streams(
        model,
        counted(taken),
        CorpusSection(rows=3, length=30, temperatures=(1.0,)),
        0,
        stop_ids=frozenset(),
        end_id=END,
    )
    assert streams.tokens.shape == streams.written.shape == (3, 30)
    for tokens, written in zip(streams.tokens.tolist(), streams.written.tolist(), strict=True):
        at = 0
        while at + 11 <= 30:
            # fed 2, written 3, end of turn; fed 1, written 2, end of turn; fed 1
            assert written[at : at + 11] == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2 + [False] * 2
            assert tokens[at] >= 100 and tokens[at + 1] == 60 and tokens[at + 5] == END
            assert tokens[at + 6] == 61 and tokens[at + 9] == END and tokens[at + 10] == 62
            at += 11
    assert len(taken) >= 9  # a row takes its next script as soon as it is free


def test_greedy_rows_are_what_the_model_would_say(model: Any):
    streams = write_streams(
        model, counted([]), CorpusSection(rows=2, length=24, temperatures=(0.0,)), 0, stop_ids=frozenset(), end_id=END
    )
    with torch.no_grad():
        wanted = model(input_ids=streams.tokens).logits.argmax(-1)[:, :-1]
    own = streams.written[:, 1:]
    assert own.sum() >= 20
    assert torch.equal(streams.tokens[:, 1:][own], wanted[own])


def test_a_stop_token_ends_a_turn(model: Any):
    everything = frozenset(range(256))
    streams = write_streams(model, counted([]), CorpusSection(rows=1, length=14), 0, stop_ids=everything, end_id=END)
    # a turn of one token each, and nothing is fed to end it
    assert streams.written[0].tolist() == ([False] * 2 + [True, False, True, False]) * 2 + [False] * 2


def test_temperatures_differ_by_row_and_a_seed_repeats(model: Any):
    def write(seed: int) -> torch.Tensor:
        settings = CorpusSection(rows=4, length=20, temperatures=(0.0, 1.0))
        return write_streams(
            model, itertools.repeat((Part((70,), 100),)), settings, seed, stop_ids=frozenset(), end_id=END
        ).tokens

    first = write(0)
    assert torch.equal(first, write(0)) and not torch.equal(first, write(1))
    assert torch.equal(first[0], first[2])  # greedy, fed the same
    assert not torch.equal(first[1], first[3])


def test_the_chat_frame_is_the_templates():
    tokenizer = byte_tokenizer()
    before, after, end = chat_frame(tokenizer)
    assert tokenizer.decode(before) == "<|im_start|>user\n"
    assert tokenizer.decode([end]) == "<|im_end|>"
    assert tokenizer.decode(after) == "\n<|im_start|>assistant\n"
    tokenizer.chat_template = None
    with pytest.raises(MoexpError, match="no chat template"):
        chat_frame(tokenizer)


def test_scripts_repeat_with_their_seed_and_are_whole_turns():
    tokenizer = byte_tokenizer()
    one, again, other = (list(itertools.islice(scripts(tokenizer, seed), 40)) for seed in (0, 0, 1))
    assert one == again != other
    before, after, _ = chat_frame(tokenizer)
    for question, answer, joiner in one:
        assert list(question.given[: len(before)]) == before and question.limit > 0
        assert list(answer.given) == after and answer.limit > 0
        assert tokenizer.decode(list(joiner.given)) == "\n" and joiner.limit == 0


def section(**changes: Any) -> CorpusSection:
    values: dict[str, Any] = {"source": "write", "tokens": 200, "rows": 3, "length": 24}
    return CorpusSection(**values | changes)


def test_a_written_corpus_is_resumed_by_batch_and_repeats(model: Any, tmp_path: Path):
    tokenizer = byte_tokenizer()
    for name in ("one", "two"):
        write_corpus(section(), Author("dense", model, tokenizer), tmp_path / name, 5)
    files = sorted((tmp_path / "one").glob("*/rows.parquet"))
    assert [file.parent.name for file in files] == ["000", "001", "002"]  # 200 tokens in batches of 72
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_bytes()
    lost, kept = files[1], files[2].stat().st_mtime_ns
    before = lost.read_bytes()
    lost.unlink()
    lost.parent.rmdir()
    write_corpus(section(), Author("dense", model, tokenizer), tmp_path / "one", 5)
    assert lost.read_bytes() == before and files[2].stat().st_mtime_ns == kept


def test_rows_to_train_on_are_shuffled_and_at_most_as_many_as_asked(model: Any, tmp_path: Path):
    tokenizer = byte_tokenizer()
    rows = corpus_rows(section(tokens=100), Author("dense", model, tokenizer), tmp_path, 5)
    assert rows.shape == (4, 24) and rows.dtype == torch.int32
    everything = torch.cat([load_rows(file, tokenizer) for file in sorted(tmp_path.glob("*/rows.parquet"))])
    wanted = {tuple(row) for row in everything.tolist()}
    assert {tuple(row) for row in rows.tolist()} < wanted


def test_a_corpus_of_another_tokenizer_or_no_corpus_is_refused(tmp_path: Path):
    tokenizer, other = byte_tokenizer(), byte_tokenizer()
    rows = random_rows(3, 8)
    save_rows(tmp_path / "rows.parquet", rows, tokenizer, "dense")
    assert torch.equal(load_rows(tmp_path / "rows.parquet", tokenizer), rows)
    other.add_tokens(["new"])
    with pytest.raises(MoexpError, match="another tokenizer"):
        load_rows(tmp_path / "rows.parquet", other)
    (tmp_path / "bad.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:200])
    for name in ("bad.parquet", "missing.parquet"):
        with pytest.raises(MoexpError, match="not a corpus"):
            load_rows(tmp_path / name, tokenizer)


def test_a_corpus_that_is_not_shipped_is_an_error(model: Any, tmp_path: Path, monkeypatch):
    assert all(file.name.startswith("dense-") for file in shipped_corpora("dense"))
    monkeypatch.setattr("moexp.learn.corpus.files.shipped_corpora", lambda author: [])
    with pytest.raises(MoexpError, match="no corpus by dense is shipped.*valid: source: write"):
        corpus_rows(section(source="shipped"), Author("dense", model, byte_tokenizer()), tmp_path, 0)
