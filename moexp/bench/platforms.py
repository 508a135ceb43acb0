"""Platforms that tables are measured on: where the experts are, how fast they arrive, what a step costs without them.

`local-disk` reads real bytes from a real disk (measured). `paced-cg` and `paced-mn` hold the experts in host memory and
slow the transfers down until loading weighs beside computing as it does on the DraftExpert paper's platforms
(emulated). Of a one-token AR step here, c is what it costs with every expert resident, and x the part of it that no
loading hides (the rest runs while experts come), both measured; what the paper reports gives L, what bringing in its
experts is to cost, so the link carries (bytes of an AR step) / L. Speedups depend on the ratio, not on either time
alone.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from moexp.base.errors import MoexpError
from moexp.bench.engine import PromptEngine
from moexp.bench.jobs import Job
from moexp.config.decode import PaceSection, StoreSection
from moexp.metrics import ratio_from_draft_speedup
from moexp.papers import load_paper
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.opening import opened_store
from moexp.runtime.store.bandwidth import probe_bandwidth
from moexp.runtime.store.opening import READ_SPLITS
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.load import Target

PROBE_BYTES = 64 << 20
COMPUTE_TOKENS = 16
SKIPPED_STEPS = 4  # of a fresh engine: first touch of its memory
EXPOSED_TOKENS, EXPOSED_LOAD = 8, 4.0  # steps on a link that takes so many times c: it hides all that can be hidden


@dataclass(frozen=True)
class LoadRatio:
    """How loading weighs in a one-token AR step of x + L on a paper's platform, and how that follows from what the
    paper reports.

    Attributes:
        value: L/x, or what the step takes over c, less 1.
        kind: which of the two: "exposed" or "added".
    """

    value: float
    derivation: str
    kind: Literal["exposed", "added"]

    def load_s(self, compute_s: float, exposed_s: float) -> float:
        """L here, from c and x."""
        return self.value * exposed_s if self.kind == "exposed" else (1 + self.value) * compute_s - exposed_s


@dataclass(frozen=True)
class Platform:
    """One platform.

    Attributes:
        name: its key.
        tag: how figures from it are tagged.
        kind: of store.
        padded: whether experts are padded as the recipe asks.
        ratio: to emulate; None: nothing is slowed down.
        concurrency: transfers under way on the emulated link. A demand queues behind at most so many prefetches; short
            transfers need several, for the clock's wake-ups to be smaller than a transfer.
    """

    name: str
    tag: Literal["measured", "emulated"]
    kind: Literal["resident", "host", "disk"]
    padded: bool = False
    ratio: LoadRatio | None = None
    concurrency: int = 1

    @property
    def paced(self) -> bool:
        return self.ratio is not None


IN_MEMORY = Platform("resident", "measured", "resident", padded=True)
"""All experts in memory, padded as for the disk: EcoSpec's setting, where a step costs the traffic of its union."""


def cg_ratio() -> LoadRatio:
    """CPU to GPU, from DraftExpert's figure 2.

    Paper: DraftExpert Figure 2.
    """
    speed = {row["drafter"]: row["draft_speedup"] for row in load_paper("draftexpert").figures[2]["rows"]}
    top_k = 6
    value = ratio_from_draft_speedup(speed["top-1"], top_k)
    others = {r: (1 + value) / (1 + value * r / top_k) for r in (2, 3)}
    return LoadRatio(
        value,
        f"L/x = {value:.2f} solves (x + L) / (x + L/6) = {speed['top-1']}, the speed of top-1 drafting over the target "
        f"(DraftExpert, Figure 2); it predicts {others[2]:.2f} and {others[3]:.2f} for r = 2, 3 "
        f"(reported {speed['top-2']} and {speed['top-3']})",
        "exposed",
    )


def mn_ratio() -> LoadRatio:
    """Flash to mobile NPU, from DraftExpert's table 1.

    Paper: DraftExpert Table 1.
    """
    rows = load_paper("draftexpert").table(1).rows
    (row,) = [row for row in rows if row["platform"] == "MN"]
    staged, resident = row["ar_tps_flash_staged"], row["ar_tps_resident_reference"]
    value = resident / staged - 1
    return LoadRatio(
        value,
        f"(x + L) / c = {resident} / {staged} = {1 + value:.2f}: resident against flash-staged AR tokens/s "
        "(DraftExpert, Table 1), so loading adds 41% to an AR step beyond what it hides",
        "added",
    )


def _platforms() -> dict[str, Platform]:
    return {
        "local-disk": Platform("local-disk", "measured", "disk", padded=True),
        "host": Platform("host", "measured", "host"),
        "paced-cg": Platform("paced-cg", "emulated", "host", ratio=cg_ratio(), concurrency=2),
        "paced-mn": Platform("paced-mn", "emulated", "host", ratio=mn_ratio(), concurrency=8),
    }


def find_platform(name: str) -> Platform:
    """The platform of that name.

    Raises:
        MoexpError: there is none.
    """
    platforms = _platforms()
    if name not in platforms:
        raise MoexpError(f"unknown platform {name!r}", where="bench.platforms", valid=", ".join(platforms))
    return platforms[name]


def store_section(platform: Platform, base: StoreSection, bandwidth_bytes_s: float | None = None) -> StoreSection:
    """The platform's store: cold (nothing stays from one cycle to the next), paced where the platform is.

    Args:
        base: the recipe's, for its number of threads.
        bandwidth_bytes_s: of the emulated link.
    """
    pace = None
    if platform.paced:
        assert bandwidth_bytes_s is not None
        pace = PaceSection(bandwidth_gb_s=bandwidth_bytes_s / 1e9, concurrency=platform.concurrency)
    return StoreSection(kind=platform.kind, policy="none", io_threads=base.io_threads, pace=pace)


def probe(platform: Platform, target: Target, base: StoreSection, job: Job, *, compute: bool = True) -> dict[str, Any]:
    """What a step costs without loading, and what the link carries; plain JSON.

    `compute_s` is the median one-token AR step with all experts resident (None where they do not fit in memory).
    On disk, `bandwidth_bytes_s` is to list O_DIRECT samples at the store's own read size and concurrency; a paced
    platform has its derived link there instead.

    Args:
        job: decoded for `compute_s`.
        compute: whether that is wanted; a paced platform cannot do without.

    Raises:
        MoexpError: a paced platform whose experts do not fit in memory.
    """
    spec, index = target.spec, target.index
    expert_bytes = index.expert_bytes * target.dtype.itemsize // index.dtype.itemsize
    moved_bytes = index.stored_bytes if platform.kind == "disk" else expert_bytes
    probed: dict[str, Any] = {
        "platform": platform.name,
        "expert_bytes": expert_bytes,
        "experts_per_token": spec.experts_per_token,
        "ar_bytes_per_token": moved_bytes * spec.experts_per_token,
        "compute_s": None,
    }
    wanted = compute or platform.paced
    fits = wanted and 2 * expert_bytes * spec.num_layer_experts < _available_bytes()
    if fits:
        probed["compute_s"] = measure_compute(target, job)
    if platform.kind == "disk":
        # Samples are taken while the methods run (`sample_bandwidth`): a disk's speed drifts as the methods' does.
        probed |= {"read_bytes": moved_bytes // READ_SPLITS, "threads": base.io_threads, "bandwidth_bytes_s": []}
    if platform.ratio is not None:
        if not fits:
            raise MoexpError(
                "the experts do not fit in memory twice", where=platform.name, valid="a platform that is not paced"
            )
        exposed_s = measure_exposed(platform, target, base, job, probed["compute_s"], probed["ar_bytes_per_token"])
        load_s = platform.ratio.load_s(probed["compute_s"], exposed_s)
        probed |= {
            "ratio": platform.ratio.value,
            "derivation": platform.ratio.derivation,
            "exposed_s": exposed_s,
            "load_s": load_s,
            "bandwidth_bytes_s": [probed["ar_bytes_per_token"] / load_s],
        }
    return probed


def sample_bandwidth(target: Target, probed: dict[str, Any], seed: int) -> float:
    """One short O_DIRECT sample at the read size and concurrency of `probed`."""
    paths, threads = target.index.files, probed["threads"]
    total = min(PROBE_BYTES, sum(path.stat().st_size for path in paths))
    return probe_bandwidth(paths, probed["read_bytes"], threads=threads, total_bytes=total, seed=seed)


def measure_compute(target: Target, job: Job) -> float:
    """Seconds of a one-token AR step with every expert resident: the median over a short answer."""
    return _ar_step_s(target, StoreSection(kind="resident"), job, COMPUTE_TOKENS)


def measure_exposed(
    platform: Platform, target: Target, base: StoreSection, job: Job, compute_s: float, bytes_per_token: int
) -> float:
    """Seconds of a one-token AR step during which nothing is loaded: what it takes on a link that is slow enough to
    hide all else, less what that link takes; from a hundredth of `compute_s` to all of it.
    """
    load_s = EXPOSED_LOAD * compute_s
    section = store_section(platform, base, bytes_per_token / load_s)
    left_s = _ar_step_s(target, section, job, EXPOSED_TOKENS) - load_s
    return min(max(left_s, 0.01 * compute_s), compute_s)


def _ar_step_s(target: Target, section: StoreSection, job: Job, tokens: int) -> float:
    with opened_store(target, section) as store:
        engine = PromptEngine(target, store)
        steps, _ = decode_all(engine, job.prompt_ids, Method(), Sampling(), max_new_tokens=tokens + SKIPPED_STEPS)
        seconds = statistics.median(step.cycle_s for step in steps[SKIPPED_STEPS:])
    del engine, store
    gc.collect()  # gigabytes, where experts are padded
    return seconds


def _available_bytes() -> float:
    """Memory that is free for use; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024.0
    except OSError:
        pass
    return float("inf")
