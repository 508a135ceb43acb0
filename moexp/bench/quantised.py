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

from moexp.base.devices import prepare
from moexp.base.progress import stage
from moexp.bench.engine import PromptEngine
from moexp.bench.folder import add_provenance, begin_run
from moexp.bench.jobs import Job
from moexp.bench.measure import folder_probe, sample_link
from moexp.bench.platforms import Platform, find_platform, store_section
from moexp.bench.runner import run_methods
from moexp.bench.setup import Setup
from moexp.config.decode import StoreSection
from moexp.config.locations import artifact_path, draft_folder
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.learn.corpus.files import Author, corpus_rows
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import VERIFY, Block, Engine
from moexp.runtime.opening import method_of, opened_store
from moexp.runtime.store.pack_writer import pack_checkpoint, pack_folder
from moexp.tables.core.run import load_measured
from moexp.tables.quantised import write_quantised
from moexp.target.draft_expert import HEADER
from moexp.target.load import Target, load_target
from moexp.target.opening import find_target, open_draft_experts

STORED = "stored"
PRECISIONS = (STORED, "q8_0", "q4_0")
MN = "paced-mn"
LOSS_BLOCK = 64  # tokens a step
HELD_OUT_ROWS = 24  # as many as a target's own table is measured on (learn/build.py)


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
            _measure(Setup(recipe, targets[STORED], None, threads), platform, targets, folder / platform.name)
    runs = [measured for each in platforms if (measured := load_measured(folder / each.name)) is not None]
    shown = {name: recipe.target.dtype if name == STORED else name.upper() for name in PRECISIONS}
    return write_quantised(results, recipe.name, runs, shown, loss, recipe.bench.bootstrap_samples)


def open_precisions(recipe: Recipe, *, padded: bool) -> dict[str, Target]:
    """The target as stored and in its quantised packs, which are written where they are missing."""
    source = find_target(recipe, padded=padded)
    folders = {STORED: source}
    for quant in PRECISIONS[1:]:
        folder = pack_folder(recipe, quant)
        if not padded and recipe.target.pad_expert_width is not None:
            folder = folder.with_name(f"{folder.name}-unpadded")
        with stage(f"Pack experts ({quant})", None) as advance:
            pack_checkpoint(source, folder, quant, advance=advance)
        folders[quant] = folder
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
    """Text that the target was not trained on: what a carved target's own loss is measured on, else the prompts."""
    section = recipe.target.corpus
    if recipe.target.kind == "carved" and section.source == "shipped":
        rows_NL = corpus_rows(section, Author("dense", None, target.tokenizer), Path(), recipe.seed)
        return [[int(token) for token in row] for row in rows_NL[:HELD_OUT_ROWS]]
    return [list(job.prompt_ids) for job in _jobs(Setup(recipe, target, None, 0))]


def _jobs(setup: Setup) -> list[Job]:
    return setup.jobs(setup.recipe.bench.local_disk_prompts)


def _loss(run: RunDir, recipe: Recipe, name: str, target: Target) -> dict[str, Any]:
    loss = run.result(f"loss-{name}", target.fingerprint)
    if loss is None:
        with stage(f"Held-out loss ({name})", None):
            nats, tokens = held_out_loss(target, held_out_rows(recipe, target))
        loss = {"nats": nats, "tokens": tokens}
        run.mark_done(f"loss-{name}", target.fingerprint, loss)
    return loss


def _measure(setup: Setup, platform: Platform, targets: dict[str, Target], folder: Path) -> None:
    """All precisions and methods in turns, prompt by prompt, into `folder`.

    Args:
        setup: of the target as stored.
    """
    recipe, bench = setup.recipe, setup.recipe.bench
    jobs, methods = _jobs(setup), _methods(recipe)
    plan = setup.plan(
        jobs,
        [method for method, _ in methods.values()],
        bench.paced_new_tokens if platform.paced else bench.max_new_tokens,
        title=f"Quantised {platform.name}",
        warmup=jobs[:1],
        warmup_tokens=2,
    )
    fingerprints = {name: target.fingerprint for name, target in targets.items()}
    done = begin_run(folder, plan.settings(tag=platform.tag, targets=fingerprints, threads=setup.threads))
    if plan.is_complete(done):
        return
    add_provenance(folder, recipe.seed)
    # The link is derived from the weights as stored, and is the same for all of them.
    probed = folder_probe(platform, setup, jobs[0], folder)
    section = store_section(platform, recipe.store, probed["bandwidth_bytes_s"][0] if platform.paced else None)
    drafted = (draft_folder(recipe) / HEADER).exists()
    with ExitStack() as stack:
        engines = {}
        for name, target in targets.items():
            store = stack.enter_context(opened_store(target, section))
            experts = open_draft_experts(recipe, target) if drafted else None
            engines[name] = PromptEngine(target, store, draft_experts=experts)
        run_methods(
            lambda method: engines[methods[method.label][1]],
            plan,
            folder,
            done=done,
            after_prompt=lambda: sample_link(platform, setup.target, engines[STORED].store, probed, folder),
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
