"""Rates of this machine's disk and memory: medians of samples of latency and bandwidth, taken in turn.

A disk's speed drifts by the second, so its kinds of samples alternate (A B C A B C ...); a first round does not count.
"""

from __future__ import annotations

import mmap
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moexp.runtime.store.bandwidth import probe_bandwidth
from moexp.runtime.store.disk import open_file
from moexp.runtime.store.slots import PAGE

SMALL_READS = 64
SAMPLE_BYTES = 64 << 20
ROUNDS = 7


def in_turn(
    probes: Mapping[str, Callable[[], float]], rounds: int, advance: Callable[[int], None]
) -> dict[str, list[float]]:
    """Samples of each probe: `rounds` rounds in which each is taken once, after one that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in probes}
    for done in range(rounds + 1):
        for name, probe in probes.items():
            samples[name].append(probe())
        advance(done + 1)
    return {name: values[1:] for name, values in samples.items()}


@dataclass(frozen=True)
class DiskRates:
    """Rates of reads of a checkpoint's experts.

    Attributes:
        direct: False where the file system refused O_DIRECT: the rates may then be those of memory.
        latency_us: of one read of a page.
        one_gb_s, expert_gb_s, all_gb_s: with one read under way, those of one expert, all that the store allows.
        best_gb_s: the fastest sample of all.
    """

    direct: bool
    latency_us: float
    one_gb_s: float
    expert_gb_s: float
    all_gb_s: float
    best_gb_s: float


def probe_disk(
    paths: Sequence[Path],
    read_bytes: int,
    *,
    splits: int,
    threads: int,
    rounds: int,
    sample_bytes: int,
    advance: Callable[[int], None],
) -> DiskRates:
    """Reads experts' shards as the store does, past the page cache; warns once where that is refused.

    Args:
        read_bytes: of one read.
        splits: reads that an expert is brought in by.
        threads: reads under way at once at most.
        sample_bytes: of one sample, or the shards' size.
    """
    direct = True
    for path in paths:
        file = open_file(path)
        file.close()
        direct = direct and file.direct
    if not direct:
        warnings.warn(
            f"{paths[0].parent}: O_DIRECT is refused; what is measured may be memory and not the disk",
            RuntimeWarning,
            stacklevel=2,
        )
    total, seed = min(sample_bytes, sum(path.stat().st_size for path in paths)), iter(range(10**9))

    def rate(count: int) -> Callable[[], float]:
        return lambda: probe_bandwidth(paths, read_bytes, threads=count, total_bytes=total, seed=next(seed)) / 1e9

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*O_DIRECT is refused")  # warned about above, once
        rates = in_turn(
            {
                "latency": lambda: _small_read_us(paths[0], next(seed)),
                "one": rate(1),
                "expert": rate(min(splits, threads)),
                "all": rate(threads),
            },
            rounds,
            advance,
        )
    latency_us = statistics.median(rates.pop("latency"))
    middle = {f"{name}_gb_s": statistics.median(samples) for name, samples in rates.items()}
    return DiskRates(direct, latency_us, **middle, best_gb_s=max(max(samples) for samples in rates.values()))


def _small_read_us(path: Path, seed: int) -> float:
    """The median read of one page at a random offset."""
    file = open_file(path)
    buffer, rng = memoryview(mmap.mmap(-1, PAGE)), random.Random(seed)
    times_s: list[float] = []
    try:
        for _ in range(SMALL_READS):
            start = rng.randrange(0, max(1, file.size - PAGE), PAGE)
            begin_s = time.perf_counter()
            file.read(buffer, start, min(PAGE, file.size - start))
            times_s.append(time.perf_counter() - begin_s)
    finally:
        file.close()
    return statistics.median(times_s) * 1e6


def copy_gb_s(size: int, rounds: int) -> float:
    """10^9 bytes copied a second in host memory, with torch's threads (each byte is read once and written once)."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times_s = []
    for _ in range(rounds + 1):
        begin_s = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - begin_s)
    return size / statistics.median(times_s[1:]) / 1e9
