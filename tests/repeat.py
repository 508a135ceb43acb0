"""Runs the whole suite again and again, to find the test whose verdict depends on something other than the code.

Every run has a new seed for hypothesis and a new order of the test files. In every other run, processes that do nothing
else keep all cores busy, so that threads and transfers come late. `make test-repeat` runs it twenty times.

    python tests/repeat.py --runs 20 --csv repeats.csv [-- arguments for pytest]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

REPO = Path(__file__).parents[1]
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|errors?)\b")


@dataclass(frozen=True)
class Run:
    """What came of one run. `failures`: the tests' names; `code`: pytest's exit status."""

    number: int
    load: str
    seed: int
    passed: int
    failed: int
    seconds: float
    code: int
    failures: str

    @property
    def line(self) -> str:
        """One line for the terminal."""
        counts = f"{self.passed:5} passed {self.failed:3} failed {self.seconds:6.0f} s"
        wrong = f"  exit status {self.code}" if self.code and not self.failed else ""
        return f"run {self.number:3}  {self.load}  seed {self.seed:10}  {counts}{wrong}  {self.failures}".rstrip()


def spin() -> None:
    """Keeps a core busy until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    while True:
        pass


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Inside, so many processes compute."""
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(cores)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_suite(number: int, loaded: bool, arguments: list[str], seed: int) -> Run:
    """The whole suite, once: test files in an order drawn by `seed`, which hypothesis starts from too."""
    files = sorted(str(path.relative_to(REPO)) for path in (REPO / "tests").glob("test_*.py"))
    random.Random(seed).shuffle(files)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", "-rfE"]
    command += [f"--hypothesis-seed={seed}", *arguments, *files]
    cores = os.cpu_count() or 1
    begin_s = time.monotonic()
    with busy(cores) if loaded else contextlib.nullcontext():
        done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    summary = done.stdout.rstrip().rpartition("\n")[2]
    counts = {"passed": 0, "failed": 0}
    for count, kind in COUNT.findall(summary):
        counts["passed" if kind == "passed" else "failed"] += int(count)
    failures = " ".join(FAILED.findall(done.stdout))
    took_s = round(time.monotonic() - begin_s, 1)
    load = "busy " if loaded else "quiet"
    return Run(number, load, seed, counts["passed"], counts["failed"], took_s, done.returncode, failures)


def main() -> int:
    """Returns 1 if any run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="how many times")
    parser.add_argument("--csv", type=Path, help="a file for the results")
    parser.add_argument("--seed", type=int, help="draws the runs' seeds; by default another one each time")
    parser.add_argument("arguments", nargs="*", help="for pytest")
    options = parser.parse_args()
    rng, runs = random.Random(options.seed), list[Run]()
    for number in range(1, options.runs + 1):
        runs.append(run_suite(number, number % 2 == 0, options.arguments, rng.randrange(2**32)))
        print(runs[-1].line, flush=True)
        if options.csv:  # after every run: whoever stops here has what there is
            with open(options.csv, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [field.name for field in fields(Run)])
                writer.writeheader()
                writer.writerows(asdict(run) for run in runs)
    return int(any(run.code for run in runs))


if __name__ == "__main__":
    sys.exit(main())
