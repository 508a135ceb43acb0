"""`moexp calibrate`: measures this machine for a recipe's target, and writes it as a platform to simulate."""

from __future__ import annotations

import random
import statistics
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
from moexp.config.recipe import Recipe
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.store.opening import READ_SPLITS
from moexp.runtime.verifiers.sampling import Sampling
from moexp.sim.geometry import Geometry
from moexp.sim.hardware import ComputeSection, LinkSection, PrecisionSection, SlotsSection
from moexp.sim.platform import THIS_MACHINE, SimPlatform, load_platform, machine_file
from moexp.sim.probes import ROUNDS, SAMPLE_BYTES, DiskRates, copy_gb_s, probe_disk
from moexp.sim.stopwatch import WARM_UP, ComputeTimes, StepTimes, TimedEngine, resident_store, time_steps
from moexp.target.draft_expert import DraftExperts
from moexp.target.load import Target
from moexp.target.opening import open_target

REPEATS = 20
PROMPT = 64  # tokens before the steps that are timed
DECODED, SKIPPED = 16, 4

_PRECISION = {torch.bfloat16: "bf16", torch.float32: "fp32"}


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
    path = _file(out)
    threads = prepare(recipe.threads)
    target = open_target(recipe, padded=True)
    geometry = geometry_of(target, recipe.name)
    with stage("Disk", rounds + 1) as advance:
        expert = target.index.expert_bytes
        disk = probe_disk(
            target.index.files,
            expert // READ_SPLITS,
            splits=READ_SPLITS,
            threads=recipe.store.io_threads,
            rounds=rounds,
            sample_bytes=sample_bytes,
            said=advance,
        )
    with stage("Memory", None):
        copied = copy_gb_s(sample_bytes, rounds)
    drafts = DraftExperts(geometry.hidden, recipe.draft.width, target.spec.moe_layers).to(target.dtype)
    store, stand_ins = resident_store(target)
    with store, stage("Arithmetic", repeats + WARM_UP) as advance:
        engine = TimedEngine(target, store, draft_experts=drafts)
        prompt = random.Random(recipe.seed).choices(range(target.spec.vocab_size), k=PROMPT)
        times = time_steps(engine, prompt, repeats, advance)
        steps, _ = decode_all(engine, prompt, Method(drafter="ar"), Sampling(), max_new_tokens=DECODED)
        decoded = statistics.median(step.cycle_s for step in steps[SKIPPED:]) * 1e6

    sources: dict[str, str] = {}
    weights = "stand-in weights of the experts' size" if stand_ins else "the experts' own weights"
    how = f"measured inside the runtime, {threads} threads, medians of {repeats} steps in turn, {weights}"
    compute = _compute(times, geometry, how, sources)
    link = _link(recipe, disk, copied, expert, sources)
    slots: dict[str, Any] = {"policy": recipe.store.policy}
    if recipe.store.budget_mib is not None:
        slots["bytes"] = int(recipe.store.budget_mib * 2**20)
    sources |= {f"slots.{key}": f"store section of recipe {recipe.name}" for key in slots}
    sources |= dict.fromkeys(("precision.experts", "precision.resident"), f"dtype of recipe {recipe.name}")
    checks = {
        "disk_one_read_gb_s": (disk.one_gb_s, f"one read of {expert // READ_SPLITS} bytes under way"),
        "host_copy_gb_s": (copied, f"bytes copied a second in host memory, {threads} threads, median of {rounds}"),
        "resident_ar_step_us": (decoded, f"median AR step of a decode, nothing timed within it, {weights}"),
        "ar_step_us": (times.ar.total, f"{how}: the whole AR step"),
        "verify_step_us": (times.verify.total, f"{how}: a verification of {times.block} rows"),
        "verify_experts": (times.verify.experts / geometry.moe_layers, "experts a layer in that block's union"),
    }
    sources |= {f"checks.{name}": source for name, (_, source) in checks.items()}
    platform = SimPlatform(
        name=path.stem,
        summary=f"{recipe.name} on this machine, experts from {recipe.store.kind}",
        tag="measured",
        model=recipe.name,
        link=link,
        slots=SlotsSection(**slots),
        compute=compute,
        precision=PrecisionSection(experts=geometry.precision, resident=geometry.precision),
        checks={name: _rounded(value) for name, (value, _) in checks.items()},
        sources=sources,
        provenance={**collect_provenance(recipe.seed), "threads": threads, "target": target.fingerprint},
    )
    write_text(path, platform.to_yaml())
    return path, load_platform(path)


def calibrate_stage(recipe: Recipe, console: Console, out: Path | None = None) -> Path:
    """Calibrates, and prints what was found beside what a decode took."""
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


def geometry_of(target: Target, name: str | None = None) -> Geometry:
    """The geometry of an opened target, its attention and dense layers counted.

    Raises:
        MoexpError: it is kept in a type that has no precision here.
    """
    layers: Any = target.model.model.layers
    dense = [number for number in range(target.spec.num_layers) if number not in target.spec.moe_layers]
    if target.dtype not in _PRECISION:
        raise MoexpError(f"a target in {target.dtype}", where=str(target.folder), valid=", ".join(map(str, _PRECISION)))
    return Geometry.from_spec(
        target.spec,
        name=name,
        attention_params=sum(weight.numel() for weight in layers[target.spec.moe_layers[0]].self_attn.parameters()),
        dense_width=layers[dense[0]].mlp.gate_proj.out_features if dense else 0,
        precision=_PRECISION[target.dtype],
    )


def _file(out: Path | None) -> Path:
    if out is None:
        return machine_file()
    return out / f"{THIS_MACHINE}.yaml" if out.is_dir() else out


def _link(recipe: Recipe, disk: DiskRates, copied: float, expert: int, sources: dict[str, str]) -> LinkSection:
    """The link of the recipe's store: its disk, or host memory."""
    threads = recipe.store.io_threads
    transfers, prefetches = max(1, threads // READ_SPLITS), max(1, threads // 4 // READ_SPLITS)
    asked = f"store.io_threads of recipe {recipe.name}, {READ_SPLITS} reads an expert"
    values: dict[str, tuple[float, str]]
    if recipe.store.kind == "disk":
        how = f"reads of {expert // READ_SPLITS} bytes, " + (
            "O_DIRECT" if disk.direct else "buffered (O_DIRECT is refused here): may be memory's speed, not the disk's"
        )
        values = {
            "bandwidth_gb_s": (disk.all_gb_s, f"measured: median, {threads} under way, {how}"),
            "peak_gb_s": (disk.best_gb_s, f"measured: the fastest sample, {how}"),
            "latency_us": (disk.latency_us, f"measured: median read of one page, {how}"),
            "alone_gb_s": (disk.expert_gb_s, f"measured: median, the {READ_SPLITS} of one expert under way, {how}"),
        }
    else:
        values = {
            "bandwidth_gb_s": (copied, "measured: copies in host memory"),
            "peak_gb_s": (copied, "measured: copies in host memory"),
            "latency_us": (0.0, "in the bandwidth of copies"),
        }
    sources |= {f"link.{name}": source for name, (_, source) in values.items()}
    sources |= {"link.concurrency": asked, "link.prefetch_concurrency": f"{asked}, a quarter of them for prefetches"}
    found = {name: _rounded(value) for name, (value, _) in values.items()}
    return LinkSection(concurrency=transfers, prefetch_concurrency=prefetches, **found)


def _compute(times: ComputeTimes, geometry: Geometry, how: str, sources: dict[str, str]) -> ComputeSection:
    """Constants from the four kinds of steps, so that they add up to the AR step as measured."""
    one, ar, further = times.draft_all, times.ar, times.block - 1
    layers, moe = geometry.layers, geometry.moe_layers

    def line(first: float, block: float) -> tuple[float, float]:
        """First row and each further one, from what one row and a block take."""
        slope = max(0.0, (block - first) / further)
        return block - further * slope, slope

    attention = line(one.attention / layers, ar.attention / layers)
    shared = line(one.shared / moe, ar.shared / moe)
    each_one, each_block = _each(times.draft_one, one), _each(ar, times.verify)
    routed = line(each_one, each_block)
    router = max(0.0, (ar.moe - ar.shared - ar.experts * each_block) / moe)
    router_one = max(0.0, (one.moe - one.shared - one.experts * each_one) / moe)
    fixed = line(
        max(
            0.0,
            one.total - layers * attention[0] - moe * (shared[0] + router_one) - one.experts * each_one,
        ),
        max(0.0, ar.total - ar.attention - ar.shared - moe * router - ar.experts * each_block),
    )
    found = {
        "attention_us_per_layer": attention[0],
        "attention_us_per_token": attention[1],
        "shared_us_per_layer": shared[0],
        "shared_us_per_token": shared[1],
        "router_us": router,
        "routed_us_per_expert": routed[0],
        "routed_us_per_token": routed[1],
        "fixed_us": fixed[0],
        "fixed_us_per_token": fixed[1],
        "draft_expert_us": max(0.0, times.draft_one.draft - one.shared) / moe,
    }
    sources |= {f"compute.{name}": how for name in found}
    sources["compute.router_us"] += "; router and bookkeeping of an AR step"
    sources["compute.fixed_us"] += "; what is left of the AR step"
    sources["compute.block_rows"] = "the runtime pads every AR and verification step to so many rows"
    return ComputeSection(block_rows=times.block, **{name: _rounded(value) for name, value in found.items()})


def _each(few: StepTimes, many: StepTimes) -> float:
    """One expert's share of what two steps differ by; all of its step where they do not differ."""
    more = many.experts - few.experts
    share = (many.routed - few.routed) / more if more > 0 else 0.0
    return share if share > 0 else many.routed / max(1.0, many.experts)


def _rounded(value: float) -> float:
    """Six digits: more would be noise."""
    return float(f"{value:.6g}")
