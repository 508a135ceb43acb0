from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.records import RecordWriter, RequestRecord, StepRecord, TrainRecord, read_records

STEP = StepRecord(
    request=0,
    cycle=3,
    method="draft-expert",
    drafted=4,
    accepted=2,
    emitted=3,
    tokens=[5, 6, 7],
    draft_s=0.1,
    verify_s=0.2,
    cycle_s=0.31,
    confidences=[0.9, 0.8, 0.7, 0.1],
    unique_draft=30,
    unique_verify=90,
    union_layers=29,
    store={"demanded": 120, "stall_s": 0.05},
)
REQUEST = RequestRecord(0, "chat", "ar", 12, 2, 0.5, 0.2, "length", [8, 9])
TRAIN = TrainRecord("draft", 10, 20480, 1.5, 3e-4, 12.0, {"logit": 1.0, "token": 0.5})


def write(path: Path, *records: StepRecord | RequestRecord | TrainRecord) -> None:
    with RecordWriter(path) as writer:
        for record in records:
            writer.write(record)


@pytest.mark.parametrize("record", [STEP, REQUEST, TRAIN])
def test_a_record_is_read_back_equal(record, tmp_path: Path):
    write(tmp_path / "deep" / "file.jsonl", record, record)
    assert list(read_records(tmp_path / "deep" / "file.jsonl", type(record))) == [record, record]


def test_what_was_not_counted_is_null_not_zero(tmp_path: Path):
    write(tmp_path / "file", replace(STEP, unique_draft=None, router_overlap=None))
    assert '"unique_draft":null' in (tmp_path / "file").read_text()
    (step,) = read_records(tmp_path / "file", StepRecord)
    assert step.unique_draft is None and step.router_overlap is None


def test_a_record_can_be_read_while_the_writer_is_open(tmp_path: Path):
    with RecordWriter(tmp_path / "file") as writer:
        writer.write(TRAIN)
        assert list(read_records(tmp_path / "file", TrainRecord)) == [TRAIN]


def test_opening_again_continues(tmp_path: Path):
    write(tmp_path / "file", TRAIN)
    write(tmp_path / "file", replace(TRAIN, step=11))
    assert [record.step for record in read_records(tmp_path / "file", TrainRecord)] == [10, 11]


@settings(max_examples=30)
@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_file_cut_anywhere_resumes_with_its_whole_records(cut: int, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "file"
    records = [replace(TRAIN, step=step) for step in range(5)]
    write(path, *records)
    whole = path.read_bytes()
    cut %= len(whole) + 1
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    torn = not (whole[:cut].endswith(b"\n") or cut == 0)

    assert list(read_records(path, TrainRecord, resuming=True)) == records[:kept]
    if torn:
        with pytest.raises(MoexpError, match=f"torn last line.*line {kept + 1}"):
            list(read_records(path, TrainRecord))
    write(path, *records[kept:])  # what the resumed run does again
    assert path.read_bytes() == whole


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path):
    path = tmp_path / "file"
    write(path, TRAIN)
    with open(path, "ab") as file:
        file.write(b"x" * 200_000)
    write(path, TRAIN)
    assert list(read_records(path, TrainRecord)) == [TRAIN, TRAIN]


def test_a_full_disk_leaves_whole_records_and_the_writer_usable(tmp_path: Path, monkeypatch):
    path = tmp_path / "file"
    real_write = os.write

    def write_a_little(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, bytes(data[:-10]))

    with RecordWriter(path) as writer:
        writer.write(TRAIN)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_a_little)
            with pytest.raises(MoexpError, match="disk full.*file"):
                writer.write(TRAIN)
        assert list(read_records(path, TrainRecord)) == [TRAIN]
        writer.write(replace(TRAIN, step=11))
    assert [record.step for record in read_records(path, TrainRecord)] == [10, 11]


def test_nan_is_refused_and_nothing_is_written(tmp_path: Path):
    with RecordWriter(tmp_path / "file") as writer, pytest.raises(ValueError, match="JSON"):
        writer.write(replace(TRAIN, loss=float("nan")))
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a line of JSON .*line 2"),
        ("[1]", "not a TrainRecord .*line 2"),
        ('{"stage": "x"}', "missing field elapsed_s .*line 2"),
        ('{"stge": "x"}', "unknown field stge .*line 2"),
    ],
)
def test_a_broken_line_is_named(line: str, message: str, tmp_path: Path):
    path = tmp_path / "file"
    write(path, TRAIN)
    with open(path, "a") as file:
        file.write(line + "\n")
    for resuming in (False, True):  # only a torn last line is the mark of a kill
        with pytest.raises(MoexpError, match=message):
            list(read_records(path, TrainRecord, resuming=resuming))


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(MoexpError, match="cannot read.*nothing.jsonl"):
        list(read_records(tmp_path / "nothing.jsonl", StepRecord))


def test_records_cannot_contradict_themselves(tmp_path: Path):
    with pytest.raises(AssertionError):
        replace(STEP, emitted=4)
    with pytest.raises(AssertionError):
        replace(STEP, accepted=5)
    with pytest.raises(AssertionError):
        replace(REQUEST, new_tokens=3)
    write(tmp_path / "file", STEP)
    text = (tmp_path / "file").read_text().replace('"emitted":3', '"emitted":9')
    (tmp_path / "file").write_text(text)
    with pytest.raises(MoexpError, match="contradicts itself"):
        list(read_records(tmp_path / "file", StepRecord))
