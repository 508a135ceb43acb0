"""Decodes a target far larger than memory: a checkpoint of DeepSeek-V2-Lite's shape at full size, experts on disk.

    python -m moexp.bench.scale.run --folder /data/scale

writes about 31 GB of random weights (left for the next run with --keep), decodes by AR and by speculation (shared +
top-1 drafts) in a fresh process, and writes `results/scale/scale.csv`, `.md` and `.json` (raw): peak memory, tokens a
second, and AR's share of the disk bound, that is of what the disk gives to reads of the same size and concurrency in
the same run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.base.provenance import collect_provenance
from moexp.tables.scale import write_scale

if TYPE_CHECKING:
    from moexp.runtime.decoding.cycle import Cycle
    from moexp.runtime.decoding.method import Method
    from moexp.runtime.engine.engine import Engine

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
"""The same code at a shape for tests."""

PROMPT = list(b"Experts")
DRAFT_LENGTH = 2
MARKER = "moexp_scale.json"  # says that the folder is this benchmark's
IO_THREADS = 8
PROBE_BYTES = 256 << 20  # of the disk, before and after every cycle
MARGIN_BYTES = 4 << 30  # left free on the disk


def run(
    folder: Path,
    results: Path,
    *,
    geometry: dict[str, Any],
    tokens: int = 12,
    seed: int = 0,
    threads: int = 0,
    keep: bool = False,
    argv: Sequence[str] = (),
) -> dict[str, Any]:
    """Writes the checkpoint to `folder` unless that holds it, decodes, and writes the results; returns the figures.

    Args:
        results: folder of `scale.csv`, `scale.md` and `scale.json`.
        geometry: of the checkpoint.
        tokens: to decode by each method, after one to warm up.
        seed: of the weights.
        threads: torch's; 0: one a core.
        keep: leave the checkpoint there.

    Raises:
        MoexpError: the disk has no room, something else is in the folder, or the decoding process failed.
    """
    from moexp.bench.scale.checkpoint import checkpoint_bytes, write_checkpoint

    provenance = collect_provenance(seed)
    provenance["command"] = shlex.join(["python", "-m", "moexp.bench.scale.run", *argv])
    needed = checkpoint_bytes(geometry)
    claim(folder, {"geometry": geometry, "seed": seed}, needed)
    try:
        if not (folder / "config.json").exists():
            with stage("Write the checkpoint", needed >> 20) as advance, atomic.writing(folder):
                write_checkpoint(folder, geometry, seed=seed, advance=lambda done: advance(done >> 20))
        figures = _decode_apart(folder, tokens, threads)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    figures["checkpoint_bytes"] = needed
    write_scale(results, figures, provenance)
    return figures


def claim(folder: Path, plan: dict[str, Any], needed: int) -> None:
    """Makes the folder this benchmark's own: it continues or removes only what it wrote.

    Raises:
        MoexpError: something else is there, or the disk has no room for `needed` bytes.
    """
    marker = folder / MARKER
    if folder.exists() and any(folder.iterdir()):
        if not marker.exists() or json.loads(marker.read_text()) != plan:
            raise MoexpError("something else is there", where=str(folder), valid="a new folder")
        if (folder / "config.json").exists():
            return
    demand_space(folder, needed)
    atomic.write_json(marker, plan)


def demand_space(folder: Path, needed: int) -> None:
    """MoexpError where the disk of `folder` has no room for the checkpoint."""
    parent = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(parent).free
    if free < needed + MARGIN_BYTES:
        raise MoexpError(
            f"the checkpoint takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            where=str(parent),
            valid=f"{(needed + MARGIN_BYTES) / 1e9:.1f} GB",
        )


def _decode_apart(folder: Path, tokens: int, threads: int) -> dict[str, Any]:
    """`decode` in a process of its own, whose peak memory is that of decoding."""
    command = [sys.executable, "-m", "moexp.bench.scale.run", "--decode", "--folder", str(folder)]
    command += ["--tokens", str(tokens), "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise MoexpError(f"decoding ended with code {done.returncode}", where=str(folder))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def decode(folder: Path, tokens: int, threads: int) -> dict[str, Any]:
    """AR and speculation in turns over one disk store, each once to warm up; plain JSON."""
    from moexp.base.devices import prepare
    from moexp.runtime.decoding.method import Method
    from moexp.runtime.engine.engine import Engine
    from moexp.runtime.store.opening import READ_SPLITS, open_store
    from moexp.runtime.store.transfer import StoreOptions
    from moexp.target.load import load_target

    threads = prepare(threads)
    with stage("Load all but the experts", None):
        target = load_target(folder)
    loaded_rss = _peak_rss()
    index, spec = target.index, target.spec
    methods = {"ar": Method(), "top-1": Method(drafter="top-r", r=1, max_draft=DRAFT_LENGTH, policy="fixed")}
    probe = DiskProbe(index.files, index.expert_bytes // READ_SPLITS)
    figures: dict[str, Any] = {}
    with open_store(index, "disk", options=StoreOptions(IO_THREADS)) as store:
        # The second copy of the resident weights, in the order of the CPU's kernels, is what memory has no room for.
        engine = Engine(target, store, pack=False, prefill_rows=8)
        with stage("Decode", len(methods)) as advance:
            for name, method in methods.items():
                figures[name] = one = _decode_by(engine, method, tokens, probe)
                advance(len(figures), f"{one['tokens'] / one['decode_s']:.2f} tokens/s")
        direct = bool(getattr(getattr(store, "source", None), "direct", False))
    rows = {name: one.pop("rows") for name, one in figures.items()}
    for name, one in figures.items():
        one["bit_exact"] = rows[name] == rows["ar"] and one["ids"] == figures["ar"]["ids"]
    return {
        "methods": figures,
        "read_bytes": probe.read_bytes,
        "io_threads": IO_THREADS,
        "direct": direct,
        "threads": threads,
        "expert_bytes": index.expert_bytes,
        "experts": spec.num_layer_experts,
        "experts_per_token": spec.experts_per_token,
        "resident_bytes": sum(t.nbytes for t in target.model.state_dict().values() if not t.is_meta),
        "loaded_rss_bytes": loaded_rss,
        "peak_rss_bytes": _peak_rss(),
    }


@dataclass
class DiskProbe:
    """Samples what the disk gives to reads of an expert's size, at the store's concurrency; bytes a second."""

    files: Sequence[Path]
    read_bytes: int
    samples: int = 0

    def __call__(self) -> float:
        from moexp.runtime.store.bandwidth import probe_bandwidth

        seed, self.samples = self.samples, self.samples + 1
        total = min(PROBE_BYTES, sum(path.stat().st_size for path in self.files))
        return probe_bandwidth(self.files, self.read_bytes, threads=IO_THREADS, total_bytes=total, seed=seed)


def _decode_by(engine: Engine, method: Method, tokens: int, probe: DiskProbe) -> dict[str, Any]:
    """One method's figures, and digests of its logits rows."""
    from moexp.runtime.decoding.decode import LogitsDigest, decode_all
    from moexp.runtime.verifiers.sampling import Sampling

    decode_all(engine, PROMPT, method, Sampling(), max_new_tokens=2)  # touch memory, wake the disk
    digest = LogitsDigest()
    samples = [probe()]  # between the cycles, whose time it is not part of: a disk's speed drifts

    def observe(cycle: Cycle) -> None:
        digest(cycle)
        samples.append(probe())

    steps, record = decode_all(engine, PROMPT, method, Sampling(), max_new_tokens=tokens, on_cycle=observe)
    return {
        "tokens": record.new_tokens,
        "cycles": len(steps),
        "decode_s": record.decode_s,
        "cycle_s": statistics.median(step.cycle_s for step in steps),
        **{name: sum(step.store[name] for step in steps) for name in ("read_bytes", "stall_s", "demanded")},
        "disk_bytes_s": samples,
        "ids": record.tokens,
        "rows": [row.hex() for row in digest.rows],
    }


def _peak_rss() -> int:
    """Most memory that this process has held, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise MoexpError("the system does not say how much memory a process held", where="/proc/self/status")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 where speculation was not exact, 2 for a mistake in the input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m moexp.bench.scale.run", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is written")
    parser.add_argument("--results", type=Path, default=Path("results/scale"), help="where the table goes")
    parser.add_argument("--tokens", type=int, default=12, help="to decode by each method")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: one a core")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--tiny", action="store_true", help="a shape for tests")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.decode:
            print(json.dumps(decode(options.folder, options.tokens, options.threads)))
            return 0
        from moexp.bench.scale.checkpoint import V2_LITE

        figures = run(
            options.folder,
            options.results,
            geometry=TINY if options.tiny else V2_LITE,
            tokens=options.tokens,
            seed=options.seed,
            threads=options.threads,
            keep=options.keep,
            argv=arguments,
        )
    except MoexpError as error:
        print(f"scale: error: {error}", file=sys.stderr)
        return 2
    print((options.results / "scale.md").read_text())
    return 0 if all(one["bit_exact"] for one in figures["methods"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
