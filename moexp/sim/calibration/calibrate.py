"""`moexp calibrate`: measures this machine for a recipe's target, and writes it as a platform to simulate."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moexp.base.atomic import write_text
from moexp.base.devices import prepare
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.base.provenance import collect_provenance
from moexp.base.yamlio import dump_yaml
from moexp.config.recipe import Recipe
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.store.opening import READ_SPLITS
from moexp.runtime.verifiers.sampling import Sampling
from moexp.sim.calibration.disk import ROUNDS, SAMPLE_BYTES, DiskRates, copy_gb_s, probe_disk
from moexp.sim.calibration.step_timer import WARM_UP, ComputeTimes, StepTimes, TimedEngine, resident_store, time_steps
from moexp.sim.platforms.files import THIS_MACHINE, machine_file, parse_platform
from moexp.sim.platforms.platform import SimPlatform
from moexp.target.draft_expert import DraftExperts
from moexp.target.load import Target
from moexp.target.opening import open_target

REPEATS = 20
PROMPT = 64  # tokens before the steps that are timed
DECODED, SKIPPED = 16, 4

_PRECISION = {torch.bfloat16: "bf16", torch.float32: "fp32"}

Constants = dict[str, tuple[Any, str]]
"""Name -> value and source."""


@dataclass(frozen=True)
class Compute:
    """Computing with every expert in memory: steps by their parts, the AR step of a decode in us, and the weights."""

    times: ComputeTimes
    decoded_us: float
    weights: str


def calibrate(
    recipe: Recipe,
    out: Path | None = None,
    *,
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
    sample_bytes: int = SAMPLE_BYTES,
) -> tuple[Path, SimPlatform]:
    """Measures disk, memory and arithmetic for the target of a recipe, and writes `this-machine`.

    Args:
        out: the file, or a folder for it; by default `$MOEXP_HOME/platforms/this-machine.yaml`.
        rounds, repeats: samples of the disk, and steps of each kind.
        sample_bytes: of a sample of the disk.

    Returns:
        the file and the platform.

    Raises:
        MoexpError: the target is not built, or the file cannot be written.
    """
    path = machine_file() if out is None else out / f"{THIS_MACHINE}.yaml" if out.is_dir() else out
    threads = prepare(recipe.threads)
    target = open_target(recipe, padded=True)
    if target.dtype not in _PRECISION:
        raise MoexpError(f"a target in {target.dtype}", where=str(target.folder), valid=", ".join(map(str, _PRECISION)))
    expert = target.index.expert_bytes
    with stage("Disk", rounds + 1) as advance:
        disk = probe_disk(
            target.index.files,
            expert // READ_SPLITS,
            splits=READ_SPLITS,
            threads=recipe.store.io_threads,
            rounds=rounds,
            sample_bytes=sample_bytes,
            advance=advance,
        )
    with stage("Memory", None):
        copied = copy_gb_s(sample_bytes, rounds)
    compute = _time_compute(recipe, target, repeats)
    moe_layers = len(target.spec.moe_layers)
    precision = (_PRECISION[target.dtype], f"dtype of recipe {recipe.name}")
    how = f"measured inside the runtime, {threads} threads, medians of {repeats} steps in turn, {compute.weights}"
    copies = f"bytes copied a second in host memory, {threads} threads, median of {rounds}"
    sections: dict[str, Constants] = {
        "link": _link(recipe, disk, copied, expert),
        "slots": _slots(recipe),
        "compute": _compute(compute.times, target.spec.num_layers, moe_layers, how),
        "precision": {"experts": precision, "resident": precision},
        "checks": {
            "disk_one_read_gb_s": (disk.one_gb_s, f"one read of {expert // READ_SPLITS} bytes under way"),
            "host_copy_gb_s": (copied, copies),
            **_checks(compute, moe_layers, how),
        },
    }
    provenance = {**collect_provenance(recipe.seed), "threads": threads, "target": target.fingerprint}
    return path, _write(path, recipe, sections, provenance)


def _write(path: Path, recipe: Recipe, sections: dict[str, Constants], provenance: dict[str, Any]) -> SimPlatform:
    """Writes the constants as a platform's file; the platform that it holds."""
    values: dict[str, Any] = {
        "name": path.stem,
        "summary": f"{recipe.name} on this machine, experts from {recipe.store.kind}",
        "tag": "measured",
        "models": [recipe.name],
    }
    for section, constants in sections.items():
        values[section] = {
            name: {"value": _rounded(value), "source": source} for name, (value, source) in constants.items()
        }
    values["provenance"] = provenance
    platform = parse_platform(path, values)
    write_text(path, dump_yaml(values))
    return platform


def calibrate_stage(recipe: Recipe, console: Console, out: Path | None = None) -> Path:
    """Calibrates, and prints the constants beside the time of a decode."""
    path, platform = calibrate(recipe, out)
    table = Table("constant", "value", box=None, pad_edge=False)
    for key, value in platform.constants():
        if isinstance(value, int | float):
            table.add_row(key, f"{value:,.6g}")
    console.print(table)
    checks = platform.checks
    console.print(
        f"AR step with every expert in place: {checks['ar_step_us'] / 1e3:.1f} ms by its parts, "
        f"{checks['resident_ar_step_us'] / 1e3:.1f} ms in a decode",
        highlight=False,
    )
    console.print(f"platform: {path}", soft_wrap=True, highlight=False)
    return path


def _time_compute(recipe: Recipe, target: Target, repeats: int) -> Compute:
    """Steps with every expert in memory, and a decode."""
    spec = target.spec
    drafts = DraftExperts(spec.hidden_size, recipe.draft.width, spec.moe_layers).to(target.dtype)
    store, stand_ins = resident_store(target)
    with store, stage("Arithmetic", repeats + WARM_UP) as advance:
        engine = TimedEngine(target, store, draft_experts=drafts)
        prompt = random.Random(recipe.seed).choices(range(spec.vocab_size), k=PROMPT)
        times = time_steps(engine, prompt, repeats, advance)
        steps, _ = decode_all(engine, prompt, Method(drafter="ar"), Sampling(), max_new_tokens=DECODED)
    decoded_us = statistics.median(step.cycle_s for step in steps[SKIPPED:]) * 1e6
    weights = "stand-in weights of the experts' size" if stand_ins else "the experts' own weights"
    return Compute(times, decoded_us, weights)


def _slots(recipe: Recipe) -> Constants:
    source = f"store section of recipe {recipe.name}"
    slots: Constants = {"policy": (recipe.store.policy, source)}
    if recipe.store.budget_mib is not None:
        slots["bytes"] = (int(recipe.store.budget_mib * 2**20), source)
    return slots


def _link(recipe: Recipe, disk: DiskRates, copied: float, expert: int) -> Constants:
    """The link of the recipe's store: its disk, or host memory."""
    threads = recipe.store.io_threads
    transfers, prefetches = max(1, threads // READ_SPLITS), max(1, threads // 4 // READ_SPLITS)
    reads = f"store.io_threads of recipe {recipe.name}, {READ_SPLITS} reads an expert"
    shared: Constants = {
        "concurrency": (transfers, reads),
        "prefetch_concurrency": (prefetches, f"{reads}, a quarter of them for prefetches"),
    }
    if recipe.store.kind != "disk":
        rate = (copied, "measured: copies in host memory")
        return {
            "bandwidth_gb_s": rate,
            "peak_gb_s": rate,
            "latency_us": (0.0, "in the bandwidth of copies"),
            **shared,
        }
    how = f"reads of {expert // READ_SPLITS} bytes, " + (
        "O_DIRECT" if disk.direct else "buffered (O_DIRECT is refused here): may be memory's speed, not the disk's"
    )
    return {
        "bandwidth_gb_s": (disk.all_gb_s, f"measured: median, {threads} under way, {how}"),
        "peak_gb_s": (disk.best_gb_s, f"measured: the fastest sample, {how}"),
        "latency_us": (disk.latency_us, f"measured: median read of one page, {how}"),
        **shared,
        "alone_gb_s": (disk.expert_gb_s, f"measured: median, the {READ_SPLITS} of one expert under way, {how}"),
    }


def _checks(compute: Compute, moe_layers: int, how: str) -> Constants:
    """Times of entire steps, which the simulator does not use."""
    times = compute.times
    decode = f"median AR step of a decode, nothing timed within it, {compute.weights}"
    return {
        "resident_ar_step_us": (compute.decoded_us, decode),
        "ar_step_us": (times.ar.total, f"{how}: the whole AR step"),
        "verify_step_us": (times.verify.total, f"{how}: a verification of {times.block} rows"),
        "verify_experts": (times.verify.experts / moe_layers, "experts a layer in that block's union"),
    }


def _compute(times: ComputeTimes, layers: int, moe: int, how: str) -> Constants:
    """Constants from the four kinds of steps, so that they add up to the AR step as measured."""
    one, ar, further = times.draft_all, times.ar, times.block - 1

    def line(first: float, block: float) -> tuple[float, float]:
        """First row and each further one, from the times of one row and of a block."""
        slope = max(0.0, (block - first) / further)
        return block - further * slope, slope

    attention = line(one.attention / layers, ar.attention / layers)
    shared = line(one.shared / moe, ar.shared / moe)
    each_one, each_block = _each(times.draft_one, one), _each(ar, times.verify)
    routed = line(each_one, each_block)
    router = max(0.0, (ar.moe - ar.shared - ar.experts * each_block) / moe)
    router_one = max(0.0, (one.moe - one.shared - one.experts * each_one) / moe)
    rest_one = one.total - layers * attention[0] - moe * (shared[0] + router_one) - one.experts * each_one
    rest = ar.total - ar.attention - ar.shared - moe * router - ar.experts * each_block
    fixed = line(max(0.0, rest_one), max(0.0, rest))
    return {
        "attention_us_per_layer": (attention[0], how),
        "attention_us_per_token": (attention[1], how),
        "shared_us_per_layer": (shared[0], how),
        "shared_us_per_token": (shared[1], how),
        "router_us": (router, f"{how}; router and bookkeeping of an AR step"),
        "routed_us_per_expert": (routed[0], how),
        "routed_us_per_token": (routed[1], how),
        "fixed_us": (fixed[0], f"{how}; what is left of the AR step"),
        "fixed_us_per_token": (fixed[1], how),
        "draft_expert_us": (max(0.0, times.draft_one.draft - one.shared) / moe, how),
        "block_rows": (times.block, "the runtime pads every AR and verification step to so many rows"),
    }


def _each(few: StepTimes, more: StepTimes) -> float:
    """One expert's share of the difference of two steps; all of its step where they do not differ."""
    added = more.experts - few.experts
    share = (more.routed - few.routed) / added if added > 0 else 0.0
    return share if share > 0 else more.routed / max(1.0, more.experts)


def _rounded(value: Any) -> Any:
    """Six digits of a measured number: more would be noise."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
