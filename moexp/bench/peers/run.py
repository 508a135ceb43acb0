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
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Self

from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.base.provenance import collect_provenance
from moexp.bench.jobs import make_jobs, select_prompts
from moexp.config.recipe import Recipe, load_recipe
from moexp.tables.peers import answer_rate, write_peers
from moexp.target.load import read_config
from moexp.target.opening import find_target
from moexp.target.pack_format import read_index
from moexp.target.spec import MoESpec
from moexp.target.tokenizer import load_tokenizer

ENGINES = ("moexp", "accelerate", "llama.cpp")
WARM_UP = 2  # tokens of each engine before anything counts


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


@dataclass(frozen=True)
class PeerRun:
    """What is compared, and with what.

    Attributes:
        target: a carved checkpoint; its experts are padded if it is.
        prompts: token ids.
        folder: for the GGUF file and what is offloaded.
        tokens: to decode after each prompt.
        llama_python: an interpreter that has llama-cpp-python.
        name: the target's; its folder's by default.
    """

    target: Path
    prompts: Sequence[Sequence[int]]
    folder: Path
    engines: Sequence[str] = ENGINES
    tokens: int = 8
    threads: int = 2
    io_threads: int = 8
    llama_python: str = sys.executable
    name: str = ""


def run(plan: PeerRun, results: Path, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Prepares the engines, lets them decode in turns, and writes `peers.csv`, `.md` and `.json` to `results`.

    Returns:
        the raw figures.

    Raises:
        MoexpError: a disk without room, or an engine that failed.
    """
    provenance = collect_provenance(0)
    provenance["command"] = shlex.join(["python", "-m", "moexp.bench.peers.run", *argv])
    index, spec = read_index(plan.target), MoESpec.from_config(read_config(plan.target))
    plan.folder.mkdir(parents=True, exist_ok=True)
    options = _prepare(plan, index.expert_bytes * len(index.keys))
    raw = {
        "target": plan.name or plan.target.name,
        "engines": _decode_in_turns(plan, options),
        "versions": {engine: version(engine, plan.llama_python) for engine in plan.engines},
        "needed_bytes": index.expert_bytes * spec.experts_per_token,
        "expert_bytes": index.expert_bytes,
        "experts_per_token": spec.experts_per_token,
        "threads": plan.threads,
        "io_threads": plan.io_threads,
        "read_ahead_kb": read_ahead_kb(plan.folder),
    }
    write_peers(results, raw, provenance)
    return raw


def _decode_in_turns(plan: PeerRun, options: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Each engine's answers; the order of engines changes from prompt to prompt."""
    answers: dict[str, list[dict[str, Any]]] = {engine: [] for engine in plan.engines}
    with ExitStack() as stack:
        workers = {}
        with stage("Start the engines", len(plan.engines)) as advance:
            for engine in plan.engines:
                python = plan.llama_python if engine == "llama.cpp" else sys.executable
                workers[engine] = stack.enter_context(Worker(engine, python, options[engine]))
                workers[engine].decode(plan.prompts[0], WARM_UP)
                advance(len(workers), engine)
        with stage("Decode in turns", len(plan.prompts)) as advance:
            for done, ids in enumerate(plan.prompts, 1):
                for engine in plan.engines if done % 2 else reversed(plan.engines):
                    answers[engine].append(workers[engine].decode(ids, plan.tokens))
                own = answers.get("moexp")
                advance(done, f"moexp {answer_rate(own[-1]):.2f} tokens/s" if own else "")
    return answers


def _prepare(plan: PeerRun, pool_bytes: int) -> dict[str, dict[str, Any]]:
    """Options of each engine, after what they decode from is written."""
    folder, engines = plan.folder, plan.engines
    gguf, offload = folder / f"{plan.target.name}.gguf", folder / "offloaded"
    missing = ("llama.cpp" in engines and not gguf.exists()) + ("accelerate" in engines and not offload.exists())
    free = shutil.disk_usage(folder).free
    if free < missing * pool_bytes * 1.1:
        wanted = f"{missing * pool_bytes * 1.1 / 1e9:.1f} GB"
        raise MoexpError(f"{free / 1e9:.1f} GB are free", where=str(folder), valid=wanted)
    if "llama.cpp" in engines:
        from moexp.bench.peers.gguf import write_gguf  # it loads torch and transformers

        with stage("Write the GGUF file", None):
            write_gguf(plan.target, gguf)
    offload.mkdir(exist_ok=True)
    return {
        "moexp": {"model": str(plan.target), "threads": plan.threads, "io_threads": plan.io_threads},
        "accelerate": {"model": str(plan.target), "threads": plan.threads, "offload": str(offload)},
        "llama.cpp": {"model": str(gguf), "threads": plan.threads},
    }


def read_ahead_kb(folder: Path) -> int | None:
    """What the system reads around a page that is missing, of files in a folder; None where it does not say. What
    decodes from mappings depends on it: Linux's default is 128, and some virtual disks have 8,192.
    """
    device = folder.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for parent in (entry, entry / ".."):  # of a partition, its disk
        try:
            return int((parent / "queue" / "read_ahead_kb").read_text())
        except (OSError, ValueError):
            continue
    return None


def version(engine: str, llama_python: str) -> str:
    """What decodes, in its version."""
    if engine == "llama.cpp":
        script = "from importlib.metadata import version; print(version('llama-cpp-python'))"
        done = subprocess.run([llama_python, "-c", script], capture_output=True, text=True, check=False)
        return f"llama-cpp-python {done.stdout.strip()}"
    packages = ("moexp", "torch") if engine == "moexp" else ("transformers", "accelerate", "torch")
    return ", ".join(f"{package} {installed(package)}" for package in packages)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 for a mistake in the input."""
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
        plan = PeerRun(
            target, prompt_ids(recipe, target, options.prompts), options.folder, options.engines, options.tokens,
            options.threads, recipe.store.io_threads, options.llama_python, recipe.name,
        )  # fmt: skip
        run(plan, options.results, arguments)
    except MoexpError as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return 2
    print((options.results / "peers.md").read_text())
    return 0


def prompt_ids(recipe: Recipe, target: Path, count: int) -> list[list[int]]:
    """Ids of the first prompts, one of each workload in turn."""
    chosen = select_prompts(recipe.bench.workloads, count)[:count]
    return [list(job.prompt_ids) for job in make_jobs(chosen, load_tokenizer(target))]


if __name__ == "__main__":
    sys.exit(main())
