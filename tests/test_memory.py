"""Building a target, and decoding from disk, takes memory for what is resident and asked for, never for all experts."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moexp.runtime.store.pack_writer import pack_checkpoint
from moexp.target.shards import read_header
from moexp.target.tiny import TinyTarget, build_tiny_target

CAP_MIB = 384
WIDTH = 18_432  # of an expert in bf16: 6.75 MiB, and 128 of them
EXPERTS = re.compile(r"\.mlp\.(shared_)?experts\.")

DECODE = """
import resource, sys
from pathlib import Path
import moexp.runtime.decoding.decode, moexp.target.load
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.engine.engine import Engine
from moexp.runtime.decoding.method import Method
from moexp.runtime.store.opening import open_store
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.load import load_target
import torch, transformers.models.glm4_moe.modeling_glm4_moe

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

torch.set_num_threads(1)
before = status("VmRSS")
limit = status("VmData") + (int(sys.argv[2]) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
target = load_target(Path(sys.argv[1]))
with open_store(target.index, sys.argv[3], budget_bytes=8 * target.index.expert_bytes) as store:
    engine = Engine(target, store, prefill_rows=8)
    _, record = decode_all(engine, [5, 6, 7], Method(), Sampling(), max_new_tokens=4)
print(len(record.tokens), (status("VmHWM") - before) >> 20)
"""


def widen(folder: Path, width: int) -> None:
    """Makes a checkpoint's experts as wide, with zeros that take no room on the disk."""
    for file in folder.glob("*.safetensors"):
        widen_shard(file, width)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": width}))


def widen_shard(file: Path, width: int) -> None:
    old = read_header(file)
    header: dict[str, dict] = {}
    end = 0
    for name, entry in old.items():
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        length = last - first
        if EXPERTS.search(name):
            shape = [shape[0], width] if "down_proj" in name else [width, shape[1]]
            length = 2 * shape[0] * shape[1]
        header[name] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [end, end + length]}
        end += length
    text = json.dumps(header).encode()
    wide = file.with_suffix(".wide")
    with open(file, "rb") as source, open(wide, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        data = out.tell()
        for name, entry in old.items():
            if not EXPERTS.search(name):
                first, last = entry["data_offsets"]
                source.seek(first)
                out.seek(data + header[name]["data_offsets"][0])
                out.write(source.read(last - first))
        out.truncate(data + end)
    wide.replace(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with 864 MiB of experts."""
    place = tmp_path_factory.mktemp("memory") / "target"
    # Shards are mapped one at a time, and a mapping counts against the cap.
    build_tiny_target(place, TinyTarget(layers=3, experts=64, dtype=torch.bfloat16, max_shard_size="200KB"))
    widen(place, WIDTH)
    return place


def decode_under_cap(folder: Path, kind: str = "disk") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DECODE, str(folder), str(CAP_MIB), kind]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers mappings on Linux only")
def test_experts_larger_than_memory_are_decoded_from_disk(folder: Path):
    done = decode_under_cap(folder)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, grown_mib = map(int, done.stdout.split())
    assert tokens == 4 and grown_mib < CAP_MIB
    # The cap is one: holding all experts does not fit under it.
    assert decode_under_cap(folder, "host").returncode != 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers mappings on Linux only")
def test_quantised_experts_take_no_more(folder: Path, tmp_path: Path):
    pack_checkpoint(folder, tmp_path / "packed", "q4_0")
    done = decode_under_cap(tmp_path / "packed")
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[1]) < CAP_MIB
