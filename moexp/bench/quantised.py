"""`moexp bench-quant`: what quantised experts cost and give, as stored against Q8_0 and Q4_0.

Each quantised target is a target of its own: its AR decides what is exact, and speculation on it must give the same
tokens. Loss is measured on held-out text; speed on the recipe's platforms and on the emulated Flash-to-NPU link
(`paced-mn`), all precisions over one link in one interleaved run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moexp import metrics
from moexp.base import atomic
from moexp.base.compute import prepare
from moexp.base.progress import stage
from moexp.bench.measure import keep_provenance, kept_probe, sample_link
from moexp.bench.platforms import Platform, find_platform, store_section
from moexp.bench.runner import (
    Job,
    PromptEngine,
    begin_run,
    is_complete,
    make_jobs,
    run_methods,
    run_settings,
    select_prompts,
)
from moexp.config.decode import StoreSection
from moexp.config.locations import artifact_path, draft_folder
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.learn.corpus.files import corpus_rows
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import VERIFY, Block, Engine
from moexp.runtime.opening import method_of, opened_store, sampling_of
from moexp.runtime.store.pack_writer import pack_checkpoint, pack_folder
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.run import Measured, load_measured
from moexp.tables.core.table import Row, View, set_interval, text, text_of, to_csv, view_text
from moexp.target.draft_expert import HEADER
from moexp.target.load import Target, load_target
from moexp.target.opening import find_target, open_draft_experts

STORED = "stored"
PRECISIONS = (STORED, "q8_0", "q4_0")
MN = "paced-mn"
LOSS_BLOCK = 64  # tokens a step
HELD_OUT_ROWS = 24  # as many as a target's own table is measured on (learn/build.py)

COLUMNS = ["target", "platform", "precision", "method", "tag", "prompts", "identical"]
for _name in ("tokens_per_s", "speedup", "alpha", "bytes_per_token"):
    COLUMNS += [_name, f"{_name}_lo", f"{_name}_hi"]
COLUMNS += ["held_out_nats", "held_out_tokens"]


def run_quantised(recipe: Recipe, *, out: Path | None = None, results: Path = Path("results")) -> list[Path]:
    """Packs the recipe's target, measures, and writes `results/<recipe>/quantised.csv` and `.md`.

    Draft experts, where they are trained, draft for every precision; otherwise shared + top-1 does.

    Args:
        out: folder of the raw records, in place of one under $MOEXP_HOME.

    Raises:
        MoexpError: the target is not built, or its geometry does not allow the block formats.
    """
    folder = out or artifact_path("quantised", recipe, "target", "draft", "store", "decode", "bench", "seed")
    threads = prepare(recipe.threads)
    platforms = [find_platform(name) for name in dict.fromkeys((*recipe.bench.platforms[:1], MN))]
    with RunDir(folder, recipe) as run:
        plain = open_precisions(recipe, padded=False)
        loss = {name: _loss(run, recipe, name, target) for name, target in plain.items()}
        for platform in platforms:
            targets = open_precisions(recipe, padded=True) if platform.padded else plain
            _measure(recipe, platform, targets, folder / platform.name, threads)
    found = [measured for each in platforms if (measured := load_measured(folder / each.name)) is not None]
    return _write(recipe, found, loss, results)


def open_precisions(recipe: Recipe, *, padded: bool) -> dict[str, Target]:
    """The target as stored and in its quantised packs, which are made where they are missing."""
    source = find_target(recipe, padded=padded)
    folders = {STORED: source}
    for quant in PRECISIONS[1:]:
        place = pack_folder(recipe, quant)
        if not padded and recipe.target.pad_expert_width is not None:
            place = place.with_name(f"{place.name}-unpadded")
        with stage(f"Pack experts ({quant})", None) as advance:
            pack_checkpoint(source, place, quant, advance=advance)
        folders[quant] = place
    dtype = getattr(torch, recipe.target.dtype)
    return {name: load_target(folder, dtype=dtype) for name, folder in folders.items()}


@torch.no_grad()
def held_out_loss(target: Target, rows: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Nats a token of text by the target as an engine runs it, and the tokens it is of (each row's first aside)."""
    nats, tokens = 0.0, 0
    with opened_store(target, StoreSection(kind="resident")) as store:
        engine = Engine(target, store, block=LOSS_BLOCK, prefill_rows=LOSS_BLOCK)
        for row in rows:
            engine.start(len(row))
            for begin in range(0, len(row) - 1, LOSS_BLOCK):
                fed = row[begin : min(begin + LOSS_BLOCK, len(row) - 1)]
                store.begin_cycle()
                logits_BV = engine.run(Block(fed), VERIFY).logits_BV
                wanted_B = torch.tensor(row[begin + 1 : begin + 1 + len(fed)])
                nats += float(F.cross_entropy(logits_BV, wanted_B, reduction="sum"))
            tokens += len(row) - 1
    return nats / tokens, tokens


def held_out_rows(recipe: Recipe, target: Target) -> list[list[int]]:
    """Text that the target was not made on: what a carved target's own loss is measured on, else the prompts."""
    section = recipe.target.corpus
    if recipe.target.kind == "carved" and section.source == "shipped":
        model: Any = None  # nothing is written
        rows_NL: Tensor = corpus_rows(section, model, target.tokenizer, Path(), author="dense", seed=recipe.seed)
        return [[int(token) for token in row] for row in rows_NL[:HELD_OUT_ROWS]]
    return [list(job.prompt_ids) for job in _jobs(recipe, target)]


def _jobs(recipe: Recipe, target: Target) -> list[Job]:
    prompts = select_prompts(recipe.bench.workloads, recipe.bench.local_disk_prompts)
    return make_jobs(prompts, target.tokenizer)


def _loss(run: RunDir, recipe: Recipe, name: str, target: Target) -> dict[str, Any]:
    kept = run.result(f"loss-{name}", target.fingerprint)
    if kept is None:
        with stage(f"Held-out loss ({name})", None):
            nats, tokens = held_out_loss(target, held_out_rows(recipe, target))
        kept = {"nats": nats, "tokens": tokens}
        run.mark_done(f"loss-{name}", target.fingerprint, kept)
    return kept


def _measure(recipe: Recipe, platform: Platform, targets: dict[str, Target], place: Path, threads: int) -> None:
    """All precisions and methods in turns, prompt by prompt, into `place`."""
    source = targets[STORED]
    jobs = _jobs(recipe, source)
    methods = _methods(recipe)
    tokens = recipe.bench.paced_new_tokens if platform.paced else recipe.bench.max_new_tokens
    everyone = [method for method, _ in methods.values()]
    fingerprints = {name: target.fingerprint for name, target in targets.items()}
    done = begin_run(
        place, run_settings(jobs, everyone, tokens, tag=platform.tag, targets=fingerprints, threads=threads)
    )
    if is_complete(done, jobs, everyone):
        return
    keep_provenance(place, recipe.seed)
    # The link is derived from the weights as stored, and is the same for all of them.
    probed = kept_probe(platform, source, recipe.store, jobs[0], place)
    section = store_section(platform, recipe.store, probed["bandwidth_bytes_s"][0] if platform.paced else None)
    drafted = (draft_folder(recipe) / HEADER).exists()
    with ExitStack() as held:
        engines = {}
        for name, target in targets.items():
            store = held.enter_context(opened_store(target, section))
            experts = open_draft_experts(recipe, target) if drafted else None
            engines[name] = PromptEngine(target, store, draft_experts=experts)
        run_methods(
            lambda method: engines[methods[method.label][1]],
            jobs,
            everyone,
            sampling_of(recipe.decode, recipe.seed),
            folder=place,
            done=done,
            max_new_tokens=tokens,
            stop_ids=source.stop_ids,
            title=f"Quantised {platform.name}",
            warmup=jobs[:1],
            warmup_tokens=2,
            after_prompt=lambda: sample_link(platform, source, engines[STORED].store, probed, place),
        )


def _methods(recipe: Recipe) -> dict[str, tuple[Method, str]]:
    """Label -> AR or the recipe's method, named for a precision, and that precision."""
    chosen = method_of(recipe.decode)
    if not (draft_folder(recipe) / HEADER).exists() or chosen.is_ar:
        chosen = dataclasses.replace(chosen, drafter="top-r", r=1, tree=None)
    named = {}
    for precision in PRECISIONS:
        for method in (Method(), chosen):
            one = dataclasses.replace(method, name=f"{precision} {'ar' if method.is_ar else method.label}")
            named[one.label] = (one, precision)
    return named


def _write(recipe: Recipe, found: list[Measured], loss: dict[str, dict[str, Any]], results: Path) -> list[Path]:
    stored = {name: recipe.target.dtype if name == STORED else name.upper() for name in PRECISIONS}
    rows = [row for measured in found for row in _rows(recipe, measured, loss, stored)]
    path = results / recipe.name / "quantised.csv"
    atomic.write_text(path, to_csv(COLUMNS, rows))
    atomic.write_text(path.with_suffix(".md"), _markdown(recipe, found, rows))
    return [path, path.with_suffix(".md")]


def _rows(recipe: Recipe, measured: Measured, loss: dict[str, dict[str, Any]], stored: dict[str, str]) -> list[Row]:
    samples = recipe.bench.bootstrap_samples
    rows: list[Row] = []
    for label, arms in measured.arms.items():
        precision, method = label.split(" ", 1)
        base = measured.arms[f"{precision} ar"]
        common = sorted(arms.keys() & base.keys())
        mine, theirs = [arms[key] for key in common], [base[key] for key in common]
        same = sum(a.request.tokens == b.request.tokens for a, b in zip(mine, theirs, strict=True))
        row: Row = {
            "target": recipe.name,
            "platform": measured.name,
            "precision": stored[precision],
            "method": method,
            "tag": measured.tag,
            "prompts": len(mine),
            "identical": f"{same}/{len(mine)}",
            "held_out_nats": loss[precision]["nats"],
            "held_out_tokens": loss[precision]["tokens"],
        }
        rates = [metrics.tokens_per_s([arm.request]) for arm in mine]
        set_interval(row, "tokens_per_s", metrics.bootstrap(rates, samples=samples))
        pairs = list(zip(rates, [metrics.tokens_per_s([arm.request]) for arm in theirs], strict=True))
        set_interval(row, "speedup", None if method == "ar" else metrics.bootstrap_quotient(pairs, samples=samples))
        set_interval(row, "alpha", metrics.bootstrap([metrics.alpha(arm.steps) for arm in mine], samples=samples))
        set_interval(
            row,
            "bytes_per_token",
            metrics.bootstrap([metrics.bytes_per_token(arm.steps) for arm in mine], samples=samples),
        )
        rows.append(row)
    order = list(stored.values())
    return sorted(rows, key=lambda row: (order.index(str(row["precision"])), row["method"] != "ar"))


def _markdown(recipe: Recipe, found: list[Measured], rows: list[Row]) -> str:
    header = ["experts", "method", "MB/token", "tokens/s", "speedup", "alpha", "tokens of AR", "held-out nats"]
    parts = [f"# Quantised experts of `{recipe.name}`"]
    for measured in found:
        shown = [
            [
                str(row["precision"]),
                str(row["method"]),
                text(float(row["bytes_per_token"] or 0) / 1e6, 1),
                *(text_of(row, name) for name in ("tokens_per_s", "speedup", "alpha")),
                str(row["identical"]),
                text(row["held_out_nats"], 3),
            ]
            for row in rows
            if row["platform"] == measured.name
        ]
        parts.append(view_text(View(f"{measured.name} ({measured.tag})", header, shown)))
    tokens = rows[0]["held_out_tokens"] if rows else 0
    parts += [
        "Each precision is a target of its own: `speedup` is over its own AR, and `tokens of AR` counts the prompts "
        "whose tokens are those of its own AR. Blocks are llama.cpp's, written by the `gguf` package and dequantised "
        "when an expert arrives; MB/token are bytes as packed. All precisions share one link and take turns. Loss is "
        f"of {tokens} tokens of held-out text.",
    ]
    runs = [run for measured in found for run in measured.provenance]
    threads = found[-1].settings.get("threads") if found else None
    parts.append(f"Provenance: {provenance_text(runs, threads=threads)}.")
    return "\n\n".join(parts) + "\n"
