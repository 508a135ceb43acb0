"""Decodes a target far larger than memory: a checkpoint of DeepSeek-V2-Lite's shape at full size, experts on disk.

    python -m moexp.bench.scale.run --folder /data/scale

writes about 31 GB of random weights (kept for the next run with --keep), decodes by AR and by speculation (shared +
top-1 drafts) in a fresh process, and writes `results/scale/scale.csv`, `.md` and `.json` (raw): peak memory, tokens a
second, and AR's share of the disk bound, that is of what the disk gives to reads of the same size and concurrency in
the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.base.provenance import collect_provenance
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.table import Row, View, text, to_csv, view_text

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
GOAL_RSS_GIB, GOAL_SHARE = 6.0, 0.8

COLUMNS = ["method", "tokens", "cycles", "tokens_per_s", "alpha", "experts_per_token", "bytes_per_token"]
COLUMNS += ["disk_bytes_s", "bound_tokens_per_s", "share_of_bound", "stall_share", "peak_rss_gib", "bit_exact", "tag"]


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
    """Writes the checkpoint to `folder` unless it is there, decodes, and writes the results; returns the figures.

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
        found = _decode_apart(folder, tokens, threads)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    found["checkpoint_bytes"] = needed
    rows = [_row(found, name) for name in found["methods"]]
    atomic.write_json(results / "scale.json", {**found, "provenance": provenance})
    atomic.write_text(results / "scale.csv", to_csv(COLUMNS, rows))
    atomic.write_text(results / "scale.md", _markdown(found, rows, provenance))
    return found


def claim(folder: Path, plan: dict[str, Any], needed: int) -> None:
    """Makes the folder this benchmark's own: only what it wrote is ever gone on with, or removed.

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
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed + MARGIN_BYTES:
        raise MoexpError(
            f"the checkpoint takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            where=str(place),
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
    from moexp.base.compute import prepare
    from moexp.runtime.decoding.cycle import Cycle
    from moexp.runtime.decoding.decode import LogitsDigest, decode_all
    from moexp.runtime.decoding.method import Method
    from moexp.runtime.engine.engine import Engine
    from moexp.runtime.store.direct_io import probe_bandwidth
    from moexp.runtime.store.store import READ_SPLITS, open_store
    from moexp.runtime.verifiers.sampling import Sampling
    from moexp.target.load import load_target

    threads = prepare(threads)
    with stage("Load all but the experts", None):
        target = load_target(folder)
    loaded_rss = _peak_rss()
    index, spec = target.index, target.spec
    methods = {"ar": Method(), "top-1": Method(drafter="top-r", r=1, max_draft=DRAFT_LENGTH, policy="fixed")}
    seeds = itertools.count()

    def probe() -> float:
        total = min(PROBE_BYTES, sum(path.stat().st_size for path in index.files))
        read = index.expert_bytes // READ_SPLITS
        return probe_bandwidth(index.files, read, threads=IO_THREADS, total_bytes=total, seed=next(seeds))

    found: dict[str, Any] = {}
    with open_store(index, "disk", io_threads=IO_THREADS) as store:
        # The second copy of the resident weights, in the order of the CPU's kernels, is what memory has no room for.
        engine = Engine(target, store, pack=False, prefill_rows=8)
        with stage("Decode", len(methods)) as advance:
            for name, method in methods.items():
                decode_all(engine, PROMPT, method, Sampling(), max_new_tokens=2)  # touch memory, wake the disk
                digest = LogitsDigest()
                samples = [probe()]  # between the cycles, whose time it is not part of: a disk's speed drifts

                def observe(cycle: Cycle, digest: LogitsDigest = digest, samples: list[float] = samples) -> None:
                    digest(cycle)
                    samples.append(probe())

                steps, record = decode_all(engine, PROMPT, method, Sampling(), max_new_tokens=tokens, on_cycle=observe)
                demanded = sum(step.store["demanded"] for step in steps if step.store)
                found[name] = {
                    "tokens": record.new_tokens,
                    "cycles": len(steps),
                    "decode_s": record.decode_s,
                    "cycle_s": statistics.median(step.cycle_s for step in steps),
                    "read_bytes": sum(step.store["read_bytes"] for step in steps if step.store),
                    "stall_s": sum(step.store["stall_s"] for step in steps if step.store),
                    "demanded": demanded,
                    "disk_bytes_s": samples,
                    "ids": record.tokens,
                    "rows": [row.hex() for row in digest.rows],
                }
                advance(len(found), f"{record.new_tokens / record.decode_s:.2f} tokens/s")
        direct = bool(getattr(getattr(store, "source", None), "direct", False))
    rows = {name: one.pop("rows") for name, one in found.items()}
    for name, one in found.items():
        one["bit_exact"] = rows[name] == rows["ar"] and one["ids"] == found["ar"]["ids"]
    return {
        "methods": found,
        "read_bytes": index.expert_bytes // READ_SPLITS,
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


def _peak_rss() -> int:
    """Most memory that this process has held, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise MoexpError("the system does not say how much memory a process held", where="/proc/self/status")


def _row(found: dict[str, Any], name: str) -> Row:
    one = found["methods"][name]
    bandwidth = statistics.median(one["disk_bytes_s"])
    bytes_per_token = one["read_bytes"] / one["tokens"]
    rate = one["tokens"] / one["decode_s"]
    return {
        "method": name,
        "tokens": one["tokens"],
        "cycles": one["cycles"],
        "tokens_per_s": rate,
        "alpha": one["tokens"] / one["cycles"],
        "experts_per_token": one["demanded"] / one["tokens"],
        "bytes_per_token": bytes_per_token,
        "disk_bytes_s": bandwidth,
        "bound_tokens_per_s": bandwidth / bytes_per_token,
        "share_of_bound": rate * bytes_per_token / bandwidth,
        "stall_share": one["stall_s"] / one["decode_s"],
        "peak_rss_gib": found["peak_rss_bytes"] / 2**30,
        "bit_exact": "yes" if one["bit_exact"] else "no",
        "tag": "measured",
    }


def _markdown(found: dict[str, Any], rows: list[Row], provenance: dict[str, Any]) -> str:
    header = ["method", "tokens/s", "alpha", "GB/token", "bound, tokens/s", "share of bound", "stall", "bits of AR"]
    shown = [
        [
            str(row["method"]),
            text(row["tokens_per_s"]),
            text(row["alpha"]),
            text(float(row["bytes_per_token"] or 0) / 1e9),
            text(row["bound_tokens_per_s"]),
            text(row["share_of_bound"]),
            text(row["stall_share"]),
            str(row["bit_exact"]),
        ]
        for row in rows
    ]
    gib = 2**30
    samples = [sample / 1e9 for one in found["methods"].values() for sample in one["disk_bytes_s"]]
    parts = [
        "# A target larger than memory",
        f"{found['checkpoint_bytes'] / 1e9:.1f} GB of random bf16 weights in the format of DeepSeek-V2-Lite; "
        f"{found['experts']} routed experts of {found['expert_bytes'] / 1e6:.2f} MB, {found['experts_per_token']} a "
        f"token, all read cold from disk; {found['resident_bytes'] / gib:.2f} GiB of other weights in memory.",
        view_text(View("experts on disk (measured)", header, shown)),
        f"Peak memory of the decoding process: {found['peak_rss_bytes'] / gib:.2f} GiB (goal: at most "
        f"{GOAL_RSS_GIB:g}); after loading: {found['loaded_rss_bytes'] / gib:.2f} GiB. Goal for AR's share of the "
        f"bound: {GOAL_SHARE:g}.",
        f"The bound is what {found['io_threads']} threads get from {'O_DIRECT' if found['direct'] else 'buffered'} "
        f"reads of {found['read_bytes'] / 1e6:.2f} MB between its cycles ({min(samples):.2f} to {max(samples):.2f} "
        "GB/s; the median counts), over the bytes that a token demands. Weights are random, so alpha says nothing of "
        "real targets; that every row of logits has AR's bits does.",
        f"Provenance: {provenance_text([provenance], threads=found['threads'])}.",
    ]
    return "\n\n".join(parts) + "\n"


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

        found = run(
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
    return 0 if all(one["bit_exact"] for one in found["methods"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
