from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.config.recipe import Recipe, load_recipe
from moexp.data.traces import (
    MANIFEST,
    RoutingGeometry,
    TraceManifest,
    TraceShard,
    read_manifest,
    read_trace,
    write_shard,
)
from moexp.learn.trace import trace
from moexp.learn.trace.statistics import expert_load, union_growth
from moexp.learn.trace.trace import by_gate_then_id, limited, shards_of, trace_routing
from moexp.metrics import uniform_union
from moexp.runtime.engine.engine import AR, Block, Engine
from moexp.runtime.store.opening import open_store
from moexp.target.load import load_target, target_identity
from tests.tiny_models import tiny_folder

GEOMETRY = RoutingGeometry(layers=(1, 3), num_experts=12, top_k=3)
TEXTS = ["The quick brown fox jumps over the lazy dog.", "Grüße aus Köln 🙂", "x", "one two three four " * 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def recipe(*changes: str) -> Recipe:
    base = ["trace={tokens: 150, batch_size: 2, sequence_length: 40, shard_tokens: 50, gates: true}"]
    return load_recipe("tiny", [*base, *changes])


def run(target: Path, out: Path, text: str | None, *changes: str) -> trace.TraceReport:
    return trace_routing(recipe(*changes), target, out, work=out.parent / "work", text=text, provenance={})


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.parquet"))}


# --- what is traced ---


def test_a_trace_is_what_the_decoding_engine_routes(target: Path, text: str, tmp_path: Path):
    """Ids, order and gates of every token and layer, against the runtime reading the same text token by token."""
    report = run(target, tmp_path / "trace", text)
    shards = list(report.trace.shards())
    loaded = load_target(target, dtype=torch.float32)
    engine = Engine(loaded, open_store(loaded.index, "resident", dtype=torch.float32))
    tokens = np.concatenate([shard.token_T for shard in shards])
    samples = np.concatenate([shard.sample_T for shard in shards])
    experts = np.concatenate([shard.experts_TLk for shard in shards])
    assert len(tokens) == report.trace.manifest.tokens == 150
    # 44 and 100 bytes are cut at 40; the last sample is cut where there are enough tokens
    second = len(TEXTS[1].encode())
    assert np.bincount(samples).tolist() == [40, 4, second, 1, 40, 40, 150 - 125 - second]
    for sample in range(3):
        mine = samples == sample
        engine.start(64)
        for token, experts_Lk in zip(tokens[mine].tolist(), experts[mine], strict=True):
            out = engine.run(Block([token]), AR)
            assert np.array_equal(out.routing_LBk[:, 0], experts_Lk)
    for shard in shards:
        assert shard.gates_TLk is not None and shard.experts_TLk.dtype == np.uint8
        assert (np.diff(shard.gates_TLk.astype(np.float32), axis=-1) <= 0).all()
        scaling = loaded.model.config.routed_scaling_factor
        assert np.allclose(shard.gates_TLk.astype(np.float32).sum(-1), scaling, atol=5e-3)
        for sample in np.unique(shard.sample_T):
            positions = shard.position_T[shard.sample_T == sample]
            assert positions.tolist() == list(range(len(positions)))


def test_the_shards_are_a_data_set(target: Path, text: str, tmp_path: Path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    report = run(target, tmp_path / "trace", text)
    data = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "trace" / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert data.column_names == ["sample", "position", "token", "experts", "gates"]
    assert data.features["experts"].length == 2 * 3 and data.features["experts"].feature.dtype == "uint8"
    assert data.features["gates"].feature.dtype == "float16"
    first = next(report.trace.shards())
    assert data[7]["experts"] == first.experts_TLk[7].ravel().tolist()
    assert len(data) == 150


def test_without_gates_there_is_no_column_of_them(target: Path, text: str, tmp_path: Path):
    report = run(target, tmp_path / "trace", text, "trace.gates=false")
    assert next(report.trace.shards()).gates_TLk is None
    assert "gates" not in pq.read_schema(tmp_path / "trace" / "shard-00000.parquet").names


def test_the_recipes_corpus_is_the_one_that_draft_experts_learn_from(target: Path, tmp_path: Path):
    changes = "draft.corpus={source: write, author: target, tokens: 300, rows: 2, length: 32}"
    report = run(target, tmp_path / "trace", None, changes)
    assert report.trace.manifest.source == "the recipe's corpus"
    assert (tmp_path / "work" / "corpus-target" / "000" / "rows.parquet").exists()
    assert report.trace.manifest.tokens == 150
    again = run(target, tmp_path / "again", None, changes)
    assert files(tmp_path / "again") == files(tmp_path / "trace")
    assert again.trace.manifest.identity == report.trace.manifest.identity


def test_where_the_recipe_has_both_corpora_the_dense_models_text_follows_the_targets(tmp_path: Path, monkeypatch):
    rows = {"target": torch.full((2, 4), 1), "dense": torch.full((3, 4), 2)}
    monkeypatch.setattr(trace, "corpus_rows", lambda _section, author, *_: rows[author.name])
    monkeypatch.setattr(trace, "shipped_corpora", lambda author: [Path(author)])

    def read(author: str) -> list[int]:
        chosen = recipe(f"draft.corpus={{source: shipped, author: {author}}}")
        model: Any = None
        return [int(sample[0]) for sample in trace._samples(chosen, model, model, None, tmp_path)]

    assert read("both") == [1, 1, 2, 2, 2] and read("target") == [1, 1] and read("dense") == [2, 2, 2]


def test_equal_gates_are_ordered_by_id():
    gates, ids = by_gate_then_id(torch.tensor([[0.2, 0.5, 0.2, 0.5]]), torch.tensor([[7, 6, 3, 9]]))
    assert ids.tolist() == [[6, 9, 3, 7]] and gates.tolist()[0] == pytest.approx([0.5, 0.5, 0.2, 0.2])


@given(
    lengths=st.lists(st.integers(0, 9), max_size=8), longest=st.integers(1, 5), tokens=st.integers(1, 30),
    per_shard=st.integers(1, 12),
)  # fmt: skip
def test_cutting_keeps_every_token_in_order(lengths: list[int], longest: int, tokens: int, per_shard: int):
    texts, start = [], 0
    for length in lengths:
        texts.append(np.arange(start, start + length))
        start += length
    shards = list(shards_of(limited(texts, longest, tokens), per_shard))
    flat = [sample for part in shards for sample in part]
    assert [int(token) for sample in flat for token in sample] == list(range(min(start, tokens)))
    assert all(0 < len(sample) <= longest for sample in flat)
    sizes = [sum(map(len, part)) for part in shards]
    assert all(per_shard <= size < per_shard + longest for size in sizes[:-1])


# --- resuming ---


def test_a_stopped_trace_goes_on_and_ends_with_the_same_bytes(target: Path, text: str, tmp_path: Path, monkeypatch):
    run(target, tmp_path / "whole", text)
    plain = trace.trace_samples
    calls: list[int] = []

    def interrupted(*args: Any) -> TraceShard:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(trace, "trace_samples", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path / "stopped", text)
    with pytest.raises(MoexpError, match="not finished.*to resume"):
        read_trace(tmp_path / "stopped")
    assert len(files(tmp_path / "stopped")) == 1
    report = run(target, tmp_path / "stopped", text)
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")
    shards = len(files(tmp_path / "whole"))
    assert shards == 3 and len(calls) == 2 + shards - 1  # the finished shard was not traced again
    assert report.tokens_per_s is not None

    calls += [0, 0]
    before = len(calls)
    assert run(target, tmp_path / "stopped", text).tokens_per_s is None
    assert len(calls) == before  # done is done


def test_only_a_damaged_shard_is_traced_again(target: Path, text: str, tmp_path: Path):
    run(target, tmp_path / "trace", text)
    before = files(tmp_path / "trace")
    middle = tmp_path / "trace" / "shard-00001.parquet"
    middle.write_bytes(middle.read_bytes()[:-20])
    stamp = (tmp_path / "trace" / "shard-00002.parquet").stat().st_mtime_ns
    run(target, tmp_path / "trace", text)
    assert files(tmp_path / "trace") == before
    assert (tmp_path / "trace" / "shard-00002.parquet").stat().st_mtime_ns == stamp


def test_another_trace_or_other_text_in_the_folder_is_an_error(target: Path, text: str, tmp_path: Path):
    run(target, tmp_path / "trace", text)
    with pytest.raises(MoexpError, match="another trace is there"):
        run(target, tmp_path / "trace", text, "trace.shard_tokens=60")
    (tmp_path / "trace" / "shard-00001.parquet").unlink()
    Path(text).write_text(json.dumps({"text": "something else " * 20}) + "\n")
    with pytest.raises(MoexpError, match="the text is not the one that was traced before"):
        run(target, tmp_path / "trace", text)


def test_no_text_is_an_error(target: Path, tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    with pytest.raises(MoexpError, match="no text to trace"):
        run(target, tmp_path / "trace", str(tmp_path / "empty.jsonl"))


# --- reading ---


def random_shard(tokens: int = 30, seed: int = 0, geometry: RoutingGeometry = GEOMETRY) -> TraceShard:
    generator = np.random.default_rng(seed)
    layers, k = len(geometry.layers), geometry.top_k
    experts = generator.random((tokens, layers, geometry.num_experts)).argsort(-1)[..., :k]
    samples = np.sort(generator.integers(0, 4, tokens))
    positions = np.concatenate([np.arange(count) for count in np.bincount(samples)])
    return TraceShard(samples, positions, generator.integers(0, 99, tokens), experts)


def written(folder: Path, target: str = "t" * 64, seed: int = 0) -> TraceManifest:
    folder.mkdir(exist_ok=True)
    manifest = TraceManifest(target, "glm4_moe", GEOMETRY, False, "test", "id")
    manifest.shards = [write_shard(folder, number, random_shard(seed=seed + number), manifest) for number in range(2)]
    manifest.complete = True
    manifest.save(folder)
    return manifest


def test_what_was_written_is_read(tmp_path: Path):
    manifest = written(tmp_path / "trace")
    opened = read_trace(tmp_path / "trace", "t" * 64)
    assert opened.manifest == manifest
    for number, shard in enumerate(opened.shards()):
        wanted = random_shard(seed=number)
        assert np.array_equal(shard.experts_TLk, wanted.experts_TLk) and np.array_equal(shard.token_T, wanted.token_T)
        assert np.array_equal(shard.sample_T, wanted.sample_T) and shard.gates_TLk is None
    values = json.loads((tmp_path / "trace" / MANIFEST).read_text())
    assert (values["tokens"], len(values["shards"]), values["geometry"]["top_k"]) == (60, 2, 3)


def test_ids_above_a_byte_are_kept(tmp_path: Path):
    geometry = RoutingGeometry((0,), 300, 2)
    manifest = TraceManifest("t", "x", geometry, False, "test", "id", complete=True)
    shard = random_shard(geometry=geometry)
    manifest.shards = [write_shard(tmp_path, 0, shard, manifest)]
    manifest.save(tmp_path)
    loaded = next(read_trace(tmp_path).shards())
    assert loaded.experts_TLk.dtype == np.uint16 and np.array_equal(loaded.experts_TLk, shard.experts_TLk)
    assert shard.experts_TLk.max() > 255


def truncate(folder: Path) -> None:
    file = folder / "shard-00001.parquet"
    file.write_bytes(file.read_bytes()[:-7])


def swap(folder: Path) -> None:
    written(folder.parent / "other", seed=5)
    shutil.copy(folder.parent / "other" / "shard-00001.parquet", folder / "shard-00001.parquet")


def flip(folder: Path) -> None:
    file = folder / "shard-00000.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def unfinish(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest.complete = False
    manifest.save(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "trace shard shard-00001.parquet has .* bytes where"),
        (lambda folder: (folder / "shard-00000.parquet").unlink(), "trace shard shard-00000.parquet is missing"),
        (swap, "trace shard shard-00001.parquet (has|is not)"),
        (flip, "trace shard shard-00000.parquet is not the one"),
        (unfinish, "not finished"),
        (lambda folder: (folder / MANIFEST).unlink(), "no readable trace manifest"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "no readable trace manifest"),
        (lambda folder: (folder / MANIFEST).write_text('{"format": "x"}'), "no readable trace manifest"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "no readable trace manifest"),
    ],
)
def test_a_damaged_trace_is_one_error(tmp_path: Path, damage: Any, message: str):
    written(tmp_path / "trace")
    damage(tmp_path / "trace")
    with pytest.raises(MoexpError, match=message) as caught:
        read_trace(tmp_path / "trace")
    assert "\n" not in str(caught.value)


def test_a_trace_of_another_target_is_refused(tmp_path: Path, target: Path):
    written(tmp_path / "trace")
    with pytest.raises(MoexpError, match="a trace of target tttttttttttt, but the target is"):
        read_trace(tmp_path / "trace", target_identity(target))


def test_a_full_disk_leaves_a_trace_to_resume(target: Path, text: str, tmp_path: Path, monkeypatch):
    run(target, tmp_path / "whole", text)
    plain = trace.write_shard

    def full(folder: Path, number: int, *args: Any) -> Any:
        if number == 1:
            monkeypatch.setattr("moexp.base.atomic.os.write", no_space)
        return plain(folder, number, *args)

    def no_space(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trace, "write_shard", full)
        with pytest.raises(MoexpError, match="disk full"):
            run(target, tmp_path / "trace", text)
    monkeypatch.undo()
    run(target, tmp_path / "trace", text)
    assert files(tmp_path / "trace") == files(tmp_path / "whole")
    assert not list((tmp_path / "trace").glob(".tmp-*"))


# --- what a trace says ---


@given(data=st.data(), tokens=st.integers(1, 25), longest=st.integers(1, 8))
def test_load_and_union_growth_are_what_counting_gives(data: st.DataObject, tokens: int, longest: int):
    seed = data.draw(st.integers(0, 9999))
    shards = [random_shard(tokens, seed), random_shard(3, seed + 1)]
    load, growth = expert_load(shards, GEOMETRY), union_growth(shards, GEOMETRY, longest)
    sizes: dict[tuple[int, int], list[int]] = {(layer, b): [] for layer in range(2) for b in range(1, longest + 1)}
    counts = np.zeros((2, 12), dtype=int)
    for shard in shards:
        for row in range(len(shard)):
            for layer in range(2):
                for expert in shard.experts_TLk[row, layer]:
                    counts[layer, expert] += 1
                for length in range(1, longest + 1):
                    block = range(row, row + length)
                    if block[-1] < len(shard) and shard.sample_T[block[-1]] == shard.sample_T[row]:
                        sizes[layer, length].append(len({int(e) for t in block for e in shard.experts_TLk[t, layer]}))
    assert np.array_equal(load.counts_LE, counts)
    assert load.dead_L.tolist() == [(row == 0).sum() for row in counts]
    for (layer, length), found in sizes.items():
        assert growth.blocks_B[length - 1] == len(found)
        value = growth.unique_LB[layer, length - 1]
        assert np.isnan(value) if not found else value == pytest.approx(np.mean(found))
    assert growth.uniform_B.tolist() == [uniform_union(12, 3, length) for length in range(1, longest + 1)]


def test_uniform_routing_grows_like_the_formula_and_repeated_tokens_do_not_grow():
    uniform = random_shard(4000)
    uniform = TraceShard(np.zeros(4000), np.arange(4000), uniform.token_T, uniform.experts_TLk)
    growth = union_growth([uniform], GEOMETRY)
    assert np.allclose(growth.mean_B, growth.uniform_B, rtol=0.02)
    repeated = np.tile(uniform.experts_TLk[:1], (4000, 1, 1))
    same = TraceShard(uniform.sample_T, uniform.position_T, uniform.token_T, repeated)
    assert union_growth([same], GEOMETRY).mean_B.tolist() == [3.0] * 8


def test_the_tables_are_written_beside_the_shards(target: Path, text: str, tmp_path: Path):
    report = run(target, tmp_path / "trace", text)
    growth = (tmp_path / "trace" / "union_growth.csv").read_text().splitlines()
    assert growth[0] == "block_length,unique_verify_per_layer,lowest_layer,highest_layer,uniform,blocks,tag"
    assert growth[1].startswith("1,3.0000,3.0000,3.0000,3.0000,150,measured") and len(growth) == 9
    load = (tmp_path / "trace" / "expert_load.csv").read_text().splitlines()
    assert len(load) == 1 + 2 * 8
    assert sum(int(line.split(",")[2]) for line in load[1:]) == 150 * 2 * 3
    assert report.load.counts_LE.sum() == 900


def test_blocks_longer_than_every_text_are_left_empty(target: Path, tmp_path: Path):
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": "abcd"}) + "\n" for _ in range(5)))
    run(target, tmp_path / "trace", str(tmp_path / "short.jsonl"))
    rows = (tmp_path / "trace" / "union_growth.csv").read_text().splitlines()
    assert rows[4].split(",")[5] == "5" and rows[5].startswith("5,,,,") and ",0,measured" in rows[5]
