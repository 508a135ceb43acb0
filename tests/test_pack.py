from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import quants
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.cli import main as cli
from moexp.config.recipe import load_recipe
from moexp.runtime.decoding.decode import LogitsDigest, decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import AR, Block, Engine
from moexp.runtime.store import pack_writer as packing
from moexp.runtime.store.dequantize import dequantize_into
from moexp.runtime.store.host import load_experts
from moexp.runtime.store.opening import open_store
from moexp.runtime.store.pacing import Pacer
from moexp.runtime.store.pack_writer import pack_checkpoint
from moexp.runtime.store.transfer import StoreOptions
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.experts import ExpertIndex, ExpertWeights
from moexp.target.load import checkpoint_fingerprint, drafters_identity, load_target, target_identity
from moexp.target.opening import find_target
from moexp.target.pack_format import ALIGN, MANIFEST, QUANTS, PackedIndex, read_index, weight_sizes
from moexp.target.pad import pad_experts
from tests.family_files import CASES, Case, write_case
from tests.tiny_models import tiny_folder, whole_model

REPO = Path(__file__).parents[1]
QUANTISED = ("q8_0", "q4_0")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pack") / "source"
    return tiny_folder(folder, expert_width=32, dtype=torch.bfloat16, max_shard_size="60KB")


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory) -> dict[str, Path]:
    """A pack of the source by each quantisation."""
    folders = {}
    for quant in QUANTS:
        folders[quant] = tmp_path_factory.mktemp("packed") / quant
        pack_checkpoint(source, folders[quant], quant)
    return folders


def reference(weights: ExpertWeights, quant: str) -> ExpertWeights:
    """What the gguf package makes of an expert and back, rounded to its type."""
    kind = QUANTS[quant]
    if kind is None:
        return weights
    gate_up, down = (
        torch.from_numpy(quants.dequantize(quants.quantize(matrix.float().numpy(), kind), kind)).to(matrix.dtype)
        for matrix in (weights.gate_up, weights.down)
    )
    return ExpertWeights(gate_up, down)


def served(folder: Path, kind: str, **options) -> dict:
    """Every expert as a store serves it."""
    index = read_index(folder)
    found = {}
    with open_store(index, kind, options=StoreOptions(**options)) as store:
        ticket = store.request(index.keys, "ar")
        for key, weights in store.arrivals(ticket):
            found[key] = ExpertWeights(weights.gate_up.clone(), weights.down.clone())
        store.release(ticket)
        if kind != "resident":
            assert store.counters.read_bytes == len(index.keys) * index.stored_bytes
    return found


def copied(packed: dict[str, Path], quant: str, tmp_path: Path) -> Path:
    """A copy to spoil; what is linked stays linked to itself only."""
    return Path(shutil.copytree(packed[quant], tmp_path / "copy"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quant", QUANTISED)
def test_dequantising_gives_the_bits_of_the_gguf_package(quant: str, dtype):
    generator = np.random.default_rng(0)
    values = generator.standard_normal((300, 352), dtype=np.float32) * generator.exponential(size=(300, 1))
    values[0] = 0.0
    kind = QUANTS[quant]
    assert kind is not None
    raw = quants.quantize(values.astype(np.float32), kind)
    out = torch.empty(300, 352, dtype=dtype)
    dequantize_into(torch.from_numpy(raw).view(-1), quant, out)
    assert torch.equal(out, torch.from_numpy(quants.dequantize(raw, kind)).to(dtype))


@pytest.mark.parametrize("quant", QUANTS)
def test_every_store_serves_the_same_packed_weights_and_counts_packed_bytes(source: Path, packed, quant: str):
    plain = load_experts(ExpertIndex.from_checkpoint(source))
    wanted = {key: reference(weights, quant) for key, weights in plain.items()}
    for kind, options in (
        ("disk", {}),
        ("disk", {"pacer": Pacer(1e9, 0.0, 2)}),
        ("host", {"poison": True}),
        ("resident", {}),
    ):
        found = served(packed[quant], kind, **options)
        assert found.keys() == wanted.keys()
        for key, weights in wanted.items():
            assert torch.equal(found[key].gate_up, weights.gate_up), (kind, key)
            assert torch.equal(found[key].down, weights.down), (kind, key)


def test_records_are_whole_pages_and_as_small_as_the_format_is(source: Path, packed):
    weights = 3 * 32 * 32
    for quant, bits in (("none", 16), ("q8_0", 8.5), ("q4_0", 4.5)):
        index = read_index(packed[quant])
        assert isinstance(index, PackedIndex)
        assert index.stored_bytes % ALIGN == 0 and 0 <= index.stored_bytes - weights * bits / 8 < ALIGN
        assert weight_sizes(packed[quant])["routed_bytes"] == index.stored_bytes * len(index.keys)
        assert weight_sizes(packed[quant])["rest_bytes"] == weight_sizes(source)["rest_bytes"]


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("kind", ["disk", "host"])
def test_speculation_on_a_pack_gives_the_bits_of_its_ar(packed, quant: str, kind: str):
    target = load_target(packed[quant])
    digests = []
    with open_store(target.index, kind, options=StoreOptions(poison=True)) as store:
        engine = Engine(target, store, prefill_rows=32)
        spec = Method(drafter="top-r", r=1, max_draft=3, policy="fixed", prefetch=True)
        for method in (Method(), spec):
            digest = LogitsDigest()
            decode_all(engine, [5, 6, 7, 8], method, Sampling(), max_new_tokens=12, on_cycle=digest)
            digests.append(digest.rows)
    assert digests[0] == digests[1] and len(digests[0]) == 12


@pytest.mark.parametrize("quant", QUANTISED)
def test_a_quantised_pack_decodes_as_transformers_does_with_dequantised_weights(source: Path, packed, quant: str):
    model = whole_model(source)
    plain = load_experts(ExpertIndex.from_checkpoint(source), torch.float32)
    experts = {key: reference(weights, quant) for key, weights in plain.items()}
    for (layer, expert), weights in experts.items():
        block = model.model.layers[layer].mlp.experts
        block.gate_up_proj.data[expert] = weights.gate_up
        block.down_proj.data[expert] = weights.down
    target = load_target(packed[quant], dtype=torch.float32)
    prompt = [5, 6, 7, 8, 9]
    with open_store(target.index, "resident", dtype=torch.float32) as store:
        engine = Engine(target, store)
        engine.start(len(prompt))
        ours = engine.run(Block(prompt), AR).logits_BV
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([prompt])).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(theirs, whole_model(source)(input_ids=torch.tensor([prompt])).logits[0], atol=1e-3)


def test_only_a_quantised_pack_is_another_function(source: Path, packed):
    fingerprints = {checkpoint_fingerprint(folder) for folder in (source, *packed.values())}
    assert len(fingerprints) == 4
    assert target_identity(packed["none"]) == target_identity(source)
    assert len({target_identity(packed[quant]) for quant in QUANTS}) == 3
    assert {drafters_identity(folder) for folder in packed.values()} == {target_identity(source)}


def test_a_padded_checkpoint_can_be_packed(source: Path, tmp_path: Path):
    whole = tiny_folder(tmp_path / "whole", expert_width=32, dtype=torch.bfloat16)
    pad_experts(whole, tmp_path / "padded", 64)
    pack_checkpoint(tmp_path / "padded", tmp_path / "packed", "none")
    assert target_identity(tmp_path / "packed") == target_identity(whole)
    padded = load_experts(ExpertIndex.from_checkpoint(tmp_path / "padded"))
    for key, weights in served(tmp_path / "packed", "disk").items():
        assert torch.equal(weights.gate_up, padded[key].gate_up) and torch.equal(weights.down, padded[key].down)
    pack_checkpoint(tmp_path / "padded", tmp_path / "quantised", "q4_0")
    assert load_target(tmp_path / "quantised").spec.expert_width == 64
    assert drafters_identity(tmp_path / "quantised") == target_identity(whole)


CODED = [case for case in CASES if case.quantised or case.family == "gpt_oss"]


@pytest.mark.parametrize("case", CODED, ids=[case.id for case in CODED])
def test_experts_that_are_decoded_or_biased_are_packed_as_they_are_served(case: Case, tmp_path: Path):
    folder, _ = write_case(tmp_path / "case", case)
    source, digests = load_target(folder), []
    assert source.index.stored_bytes == sum(span.length for span in source.index.locations[source.index.keys[0]].ranges)
    pack_checkpoint(folder, tmp_path / "packed", "none")
    pack = load_target(tmp_path / "packed")
    assert pack.index.biased == source.index.biased == (case.family == "gpt_oss")
    for target in (source, pack):
        with open_store(target.index, "disk", dtype=target.dtype, options=StoreOptions(poison=True)) as store:
            digest = LogitsDigest()
            decode_all(Engine(target, store), [5, 6, 7, 8], Method(), Sampling(), max_new_tokens=4, on_cycle=digest)
            digests.append(digest.rows)
    assert digests[0] == digests[1]
    if case.family == "gpt_oss":
        pack_checkpoint(folder, tmp_path / "blocks", "q8_0")
        plain = load_experts(source.index, source.dtype)
        for kind in ("resident", "host", "disk"):
            with open_store(read_index(tmp_path / "blocks"), kind) as store:
                ticket = store.request(source.index.keys, "ar")
                for key, weights in store.arrivals(ticket):
                    blocks = reference(plain[key], "q8_0")
                    assert all(map(torch.equal, weights.tensors[:2], blocks.tensors))
                    assert all(map(torch.equal, weights.tensors[2:], plain[key].tensors[2:]))
                store.release(ticket)


@pytest.mark.parametrize("quant", ["none", "q4_0"])
def test_a_corrupt_record_is_named_when_it_is_first_read(packed, tmp_path: Path, quant: str):
    folder = copied(packed, quant, tmp_path)
    index = read_index(folder)
    with open(index.files[1], "r+b") as file:
        file.seek(3 * index.stored_bytes + 100)
        file.write(b"\x55\xaa")
    for kind in ("disk", "host", "resident"):
        with pytest.raises(MoexpError, match="expert 3 is corrupt.*layer-002"):
            served(folder, kind)
    with open_store(index, "disk") as store:
        ticket = store.request([(1, 0), (2, 2)], "ar")
        assert len(list(store.arrivals(ticket))) == 2  # its neighbours are whole
        store.release(ticket)


def test_a_cut_or_foreign_pack_is_one_clear_error(source: Path, packed, tmp_path: Path):
    folder = copied(packed, "q8_0", tmp_path)
    file = folder / "experts-layer-001.bin"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(MoexpError, match="experts-layer-001.bin has .* bytes of"):
        load_target(folder)
    shutil.rmtree(folder)
    folder = copied(packed, "q8_0", tmp_path)
    shutil.copy(packed["q4_0"] / MANIFEST, folder / MANIFEST)
    with pytest.raises(MoexpError, match="the manifest is not of this checkpoint"):
        load_target(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(MoexpError, match="no readable manifest"):
        load_target(folder)
    (folder / MANIFEST).write_text("[]")
    with pytest.raises(MoexpError, match="no readable manifest"):
        load_target(folder)


def test_what_cannot_be_packed_is_said(source: Path, packed, tmp_path: Path):
    with pytest.raises(MoexpError, match="unknown quantisation 'q5_0'.*none, q8_0, q4_0"):
        pack_checkpoint(source, tmp_path / "out", "q5_0")
    with pytest.raises(MoexpError, match="packed already"):
        pack_checkpoint(packed["none"], tmp_path / "out")
    narrow = tiny_folder(tmp_path / "narrow", expert_width=16)
    with pytest.raises(MoexpError, match="rows of 16 weights are no whole number of q4_0 blocks.*multiples of 32"):
        pack_checkpoint(narrow, tmp_path / "out", "q4_0")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(MoexpError, match="something else is there"):
        pack_checkpoint(source, tmp_path / "full")


def tree(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}


def test_an_interrupted_pack_goes_on_behind_the_last_layer(source: Path, packed, tmp_path: Path, monkeypatch):
    out, written = tmp_path / "out", []
    whole_layer = packing._write_layer

    def count(records, keys, *rest):
        written.append(keys[0][0])
        return whole_layer(records, keys, *rest)

    def stop(done: int) -> None:
        if done == 11:  # in the second layer of eight experts
            raise KeyboardInterrupt

    monkeypatch.setattr(packing, "_write_layer", count)
    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, out, "q4_0", advance=stop)
    assert not out.exists() and written == [1, 2]
    steps: list[int] = []
    pack_checkpoint(source, out, "q4_0", advance=steps.append)
    assert written == [1, 2, 2] and steps[-1] == 16
    assert tree(out) == tree(packed["q4_0"])
    assert not list(tmp_path.glob(".*"))
    pack_checkpoint(source, out, "q4_0")  # is there: nothing is written
    assert written == [1, 2, 2]
    # What another quantisation left is not gone on with.
    with pytest.raises(KeyboardInterrupt):
        pack_checkpoint(source, tmp_path / "other", "q8_0", advance=stop)
    pack_checkpoint(source, tmp_path / "other", "q4_0")
    assert tree(tmp_path / "other") == tree(packed["q4_0"])


def test_a_full_disk_is_one_error_and_leaves_no_pack(source: Path, tmp_path: Path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packing, "_write_rest", full)
    with pytest.raises(MoexpError, match="disk full"):
        pack_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(MoexpError, match="needs 0.0 GB, and 0.0 GB are free"):
        pack_checkpoint(source, tmp_path / "new")


@pytest.mark.e2e
def test_pack_command_goes_on_where_one_was_killed(moexp_home: Path, tmp_path: Path):
    changes = ["target.tiny.num_experts=64", "target.tiny.num_layers=3"]
    options = ["--recipe", "tiny", *(word for change in changes for word in ("--set", change))]

    def moexp(*arguments: str) -> str:
        result = CliRunner().invoke(cli.app, [*arguments, *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    moexp("build-target")
    script = """
import os, signal, sys
from pathlib import Path
from moexp.runtime.store.pack_writer import pack_checkpoint
def advance(done):
    if done > 64:
        os.kill(os.getpid(), signal.SIGKILL)
pack_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), "q8_0", advance=advance)
"""
    out, target = tmp_path / "out", find_target(load_recipe("tiny", changes))
    killed = subprocess.run([sys.executable, "-c", script, str(target), str(out)], cwd=REPO)
    assert killed.returncode == -signal.SIGKILL
    (first,) = tmp_path.glob(".out.packing/*.sums.json")
    assert not out.exists()
    kept = first.with_name(first.name.replace(".sums.json", ".bin"))
    written = kept.stat().st_mtime_ns
    assert f"packed: {out}" in moexp("pack", "--quant", "q8_0", "--out", str(out))
    assert (out / kept.name).stat().st_mtime_ns == written
    assert len(read_index(out).keys) == 2 * 64
    assert json.loads((out / MANIFEST).read_text())["quant"] == "q8_0"


@pytest.mark.e2e
def test_commands_take_a_pack_as_their_target(source: Path, packed, tmp_path: Path):
    def run(*arguments: str):
        use = ["--set", "target.kind=hub", "--set", "target.source=hub", "--set", f"target.path={packed['q4_0']}"]
        return CliRunner().invoke(
            cli.app, [*arguments, "--recipe", "tiny", "-s", "target.dtype=bfloat16", *use], env={"NO_COLOR": "1"}
        )

    answer = run("generate", "Hello", "--set", "decode.drafter=top-r", "--set", "store.kind=disk")
    assert answer.exit_code == 0, answer.output
    trained = run("train-draft-expert")
    assert trained.exit_code == 2 and "no packed checkpoint" in trained.stderr
