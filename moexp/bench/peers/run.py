"""AR decoding with cold experts beside two peers: transformers with accelerate's disk offload, and llama.cpp.

    python -m moexp.bench.peers.run --folder /data/peers --recipe pocket

decodes the same prompts with the same weights on the same threads, one engine after the other for each prompt, and
writes `results/peers/peers.csv`, `.md` and `.json` (raw). The target must be built (`moexp build-target`). The folder
takes about three times its routed experts: a GGUF file, what accelerate offloads, and room. llama.cpp needs
llama-cpp-python in this environment or, with --llama-python, in another.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.base.provenance import collect_provenance
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.table import Row, View, text, to_csv, view_text

ENGINES = ("moexp", "accelerate", "llama.cpp")
LABELS = {
    "moexp": "moexp, disk store",
    "accelerate": "transformers + accelerate, disk offload",
    "llama.cpp": "llama.cpp, mmap",
}
GOALS = {"accelerate": 10.0, "llama.cpp": 1.5}
"""How many times as fast moexp is meant to be."""
WARM_UP = 2  # tokens of each engine before anything counts

COLUMNS = ["engine", "version", "prompts", "tokens", "tokens_per_s", "tokens_per_s_lo", "tokens_per_s_hi", "token_ms"]
COLUMNS += ["bytes_per_token", "needed_bytes", "bytes_per_s", "moexp_ratio", "moexp_ratio_lo", "moexp_ratio_hi"]
COLUMNS += ["same_tokens", "tag"]


class Worker:
    """An engine in a process of its own.

    Args:
        python: its interpreter.
        options: of the engine.
    """

    def __init__(self, name: str, python: str, options: Mapping[str, Any]) -> None:
        self.name = name
        command = [python, "-m", "moexp.bench.peers.engines", name, json.dumps(dict(options))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def decode(self, ids: Sequence[int], tokens: int) -> dict[str, Any]:
        """{"ids", "seconds", "read_bytes"}, each of the decoded tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": list(ids), "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MoexpError(f"{self.name} ended with code {self._process.wait()}", where="its messages are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run(
    target: Path,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    results: Path,
    *,
    engines: Sequence[str] = ENGINES,
    tokens: int = 8,
    threads: int = 2,
    io_threads: int = 8,
    llama_python: str = sys.executable,
    name: str = "",
    argv: Sequence[str] = (),
) -> dict[str, Any]:
    """Prepares the engines, lets them decode in turns, and writes the results; returns the raw figures.

    Args:
        target: a carved checkpoint; its experts are padded if it is.
        prompts: token ids.
        folder: for the GGUF file and what is offloaded.
        results: folder of `peers.csv`, `.md` and `.json`.
        tokens: to decode after each prompt.
        llama_python: an interpreter that has llama-cpp-python.

    Raises:
        MoexpError: a disk without room, or an engine that failed.
    """
    from moexp.target.load import read_config
    from moexp.target.pack_format import read_index
    from moexp.target.spec import MoESpec

    provenance = collect_provenance(0)
    provenance["command"] = shlex.join(["python", "-m", "moexp.bench.peers.run", *argv])
    index, spec = read_index(target), MoESpec.from_config(read_config(target))
    needed = index.expert_bytes * spec.experts_per_token
    folder.mkdir(parents=True, exist_ok=True)
    options = _prepare(target, folder, engines, threads, io_threads, index.expert_bytes * len(index.keys))
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    with ExitStack() as stack:
        workers = {}
        with stage("Start the engines", len(engines)) as advance:
            for engine in engines:
                python = llama_python if engine == "llama.cpp" else sys.executable
                workers[engine] = stack.enter_context(Worker(engine, python, options[engine]))
                workers[engine].decode(prompts[0], WARM_UP)
                advance(len(workers), engine)
        with stage("Decode in turns", len(prompts)) as advance:
            for done, ids in enumerate(prompts, 1):
                for engine in engines if done % 2 else reversed(engines):
                    found[engine].append(workers[engine].decode(ids, tokens))
                advance(done, f"moexp {_rate(found['moexp'][-1]):.2f} tokens/s" if "moexp" in found else "")
    raw = {
        "target": name or target.name,
        "engines": found,
        "versions": {engine: version(engine, llama_python) for engine in engines},
        "needed_bytes": needed,
        "expert_bytes": index.expert_bytes,
        "experts_per_token": spec.experts_per_token,
        "threads": threads,
        "io_threads": io_threads,
        "read_ahead_kb": read_ahead_kb(folder),
    }
    rows = [row_of(raw, engine) for engine in engines]
    atomic.write_json(results / "peers.json", {**raw, "provenance": provenance})
    atomic.write_text(results / "peers.csv", to_csv(COLUMNS, rows))
    atomic.write_text(results / "peers.md", markdown(raw, rows, provenance))
    return raw


def _prepare(
    target: Path, folder: Path, engines: Sequence[str], threads: int, io_threads: int, pool_bytes: int
) -> dict[str, dict[str, Any]]:
    """Options of each engine, after what they decode from is written."""
    gguf, offload = folder / f"{target.name}.gguf", folder / "offloaded"
    missing = ("llama.cpp" in engines and not gguf.exists()) + ("accelerate" in engines and not offload.exists())
    free = shutil.disk_usage(folder).free
    if free < missing * pool_bytes * 1.1:
        wanted = f"{missing * pool_bytes * 1.1 / 1e9:.1f} GB"
        raise MoexpError(f"{free / 1e9:.1f} GB are free", where=str(folder), valid=wanted)
    if "llama.cpp" in engines:
        from moexp.bench.peers.gguf import write_gguf

        with stage("Write the GGUF file", None):
            write_gguf(target, gguf)
    offload.mkdir(exist_ok=True)
    return {
        "moexp": {"model": str(target), "threads": threads, "io_threads": io_threads},
        "accelerate": {"model": str(target), "threads": threads, "offload": str(offload)},
        "llama.cpp": {"model": str(gguf), "threads": threads},
    }


def read_ahead_kb(folder: Path) -> int | None:
    """What the system reads around a page that is missing, of files in a folder; None where it does not say. What
    decodes from mappings depends on it: Linux's default is 128, and some virtual disks have 8,192.
    """
    device = folder.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for parent in (place, place / ".."):  # of a partition, its disk
        try:
            return int((parent / "queue" / "read_ahead_kb").read_text())
        except (OSError, ValueError):
            continue
    return None


def version(engine: str, llama_python: str) -> str:
    """What decodes, in its version."""
    from importlib.metadata import version as installed

    if engine == "llama.cpp":
        said = "from importlib.metadata import version; print(version('llama-cpp-python'))"
        done = subprocess.run([llama_python, "-c", said], capture_output=True, text=True, check=False)
        return f"llama-cpp-python {done.stdout.strip()}"
    packages = ("moexp", "torch") if engine == "moexp" else ("transformers", "accelerate", "torch")
    return ", ".join(f"{package} {installed(package)}" for package in packages)


def _rate(one: Mapping[str, Any]) -> float:
    return len(one["seconds"]) / sum(one["seconds"])


def row_of(raw: Mapping[str, Any], engine: str) -> Row:
    """An engine's figures: medians over prompts, and the lowest and highest; ratios are of the same prompt."""
    mine = raw["engines"][engine]
    rates = [_rate(one) for one in mine]
    seconds = [second for one in mine for second in one["seconds"]]
    read = [count for one in mine for count in one["read_bytes"]]
    row: Row = {
        "engine": engine, "version": raw["versions"][engine], "prompts": len(mine), "tokens": len(seconds),
        "tokens_per_s": statistics.median(rates), "tokens_per_s_lo": min(rates), "tokens_per_s_hi": max(rates),
        "token_ms": 1e3 * statistics.median(seconds), "bytes_per_token": sum(read) / len(read),
        "needed_bytes": raw["needed_bytes"], "bytes_per_s": sum(read) / sum(seconds), "tag": "measured",
    }  # fmt: skip
    ours = raw["engines"].get("moexp")
    if ours:
        ratios = [_rate(own) / rate for own, rate in zip(ours, rates, strict=True)]
        pairs = [zip(own["ids"], one["ids"], strict=True) for own, one in zip(ours, mine, strict=True)]
        same = [a == b for pair in pairs for a, b in pair]
        row |= {"moexp_ratio": statistics.median(ratios), "moexp_ratio_lo": min(ratios), "moexp_ratio_hi": max(ratios)}
        row["same_tokens"] = sum(same) / len(same)
    return row


def markdown(raw: Mapping[str, Any], rows: Sequence[Row], provenance: Mapping[str, Any]) -> str:
    """The table for reading."""
    header = ["engine", "tokens/s", "MB read a token", "GB/s", "moexp is", "goal", "same tokens"]
    shown = [
        [
            LABELS[str(row["engine"])],
            f"{text(row['tokens_per_s'])} ({text(row['tokens_per_s_lo'])}..{text(row['tokens_per_s_hi'])})",
            text(float(row["bytes_per_token"] or 0) / 1e6, 0),
            text(float(row["bytes_per_s"] or 0) / 1e9),
            f"{text(row['moexp_ratio'])}x" if row.get("moexp_ratio") else "",
            f"{GOALS[str(row['engine'])]:g}x" if row["engine"] in GOALS else "",
            text(row.get("same_tokens")),
        ]
        for row in rows
    ]
    first = rows[0]
    parts = [
        "# Peers: AR decoding with cold experts",
        f"The weights of `{raw['target']}` in bf16: {raw['experts_per_token']} experts of "
        f"{raw['expert_bytes'] / 1e6:.2f} MB a token, {raw['needed_bytes'] / 1e6:.0f} MB in all; {first['prompts']} "
        f"prompts, {int(first['tokens'] or 0) // int(first['prompts'] or 1)} tokens each, {raw['threads']} threads; "
        "one engine after the other for each prompt, in changing order.",
        view_text(View("decoding, median (lowest..highest) of the prompts (measured)", header, shown)),
        "Before each token, pages of routed experts are given back to the system, from the peers' mappings and from "
        f"the page cache, so that they come from the disk as moexp's do ({raw['io_threads']} threads, O_DIRECT). "
        "Prefill and that are not timed. Bytes are what the system counts for the process; accelerate loads all "
        "experts of a layer, and a mapping brings in what the system reads ahead "
        f"({raw.get('read_ahead_kb') or 'an unknown number of'} KB here; Linux's default is 128). Tokens are ids, "
        "chosen greedily; kernels differ, so near-ties may fall elsewhere, and what follows then differs too.",
        f"{'; '.join(str(row['version']) for row in rows)}.",
        f"Provenance: {provenance_text([dict(provenance)], threads=raw['threads'])}.",
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 for a mistake in the input."""
    from moexp.config.recipe import load_recipe
    from moexp.target.opening import find_target

    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m moexp.bench.peers.run", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the peers' files are written, and kept")
    parser.add_argument("--recipe", default="pocket", help="whose target is decoded, its experts padded if it says so")
    parser.add_argument("--results", type=Path, default=Path("results/peers"), help="where the table goes")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES, help="which ones")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--prompts", type=int, default=5, help="of the recipe's workloads, in turns")
    parser.add_argument("--tokens", type=int, default=8, help="to decode after each")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe)
        target = find_target(recipe, padded=True)
        run(
            target,
            prompt_ids(recipe, target, options.prompts),
            options.folder,
            options.results,
            engines=options.engines,
            tokens=options.tokens,
            threads=options.threads,
            io_threads=recipe.store.io_threads,
            llama_python=options.llama_python,
            name=recipe.name,
            argv=arguments,
        )
    except MoexpError as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return 2
    print((options.results / "peers.md").read_text())
    return 0


def prompt_ids(recipe: Any, target: Path, count: int) -> list[list[int]]:
    """Ids of the first prompts, one of each workload in turn."""
    from moexp.bench.runner import make_jobs, select_prompts
    from moexp.target.tokenizer import load_tokenizer

    chosen = select_prompts(recipe.bench.workloads, count)[:count]
    return [list(job.prompt_ids) for job in make_jobs(chosen, load_tokenizer(target))]


if __name__ == "__main__":
    sys.exit(main())
