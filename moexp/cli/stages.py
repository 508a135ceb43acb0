"""The stages that commands run, each with what it prints: build, trace, train, check.

Every stage finds its input and leaves its output where `moexp.config.locations` says; what is done is not done again.
What needs torch is imported in functions, so that a mistake in a recipe is shown at once.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moexp.base import ranks
from moexp.base.atomic import write_json
from moexp.base.devices import prepare
from moexp.base.errors import MoexpError
from moexp.base.provenance import collect_provenance
from moexp.config import locations
from moexp.config.locations import draft_work, home, results_folder, trace_folder
from moexp.config.recipe import Recipe
from moexp.tables.gate import gate_lines, gate_table, write_gate
from moexp.tables.trained.files import write_predictor_summary
from moexp.tables.trained.terminal import (
    draft_table,
    growth_table,
    head_table,
    load_table,
    predictor_table,
    quality_table,
)
from moexp.target.opening import find_head, find_target

if TYPE_CHECKING:
    from moexp.target.trained import TrainedFiles


def begin(recipe: Recipe) -> None:
    """Threads and allocator for this process, and no progress bars but our own."""
    prepare(recipe.threads)
    from transformers.utils import logging

    logging.disable_progress_bar()


def print_path(console: Console, label: str, path: Path) -> None:
    """A line that can be copied: neither wrapped nor coloured."""
    console.print(f"{label}: {path}", soft_wrap=True, highlight=False)


def build_stage(recipe: Recipe, console: Console) -> Path:
    """Builds the target unless that is done (a hub checkpoint is only fetched), and prints what was measured on it."""
    from moexp.learn.target.build import build_target, read_manifest

    begin(recipe)
    if recipe.target.kind == "hub":
        folder = find_target(recipe)
        print_path(console, "a checkpoint, nothing to build", folder)
        return folder
    cache, provenance = locations.source_cache(), collect_provenance(recipe.seed)
    folder = build_target(recipe, locations.target_folder(recipe), cache=cache, provenance=provenance)
    manifest = read_manifest(folder)
    if manifest.get("quality"):
        console.print(quality_table(manifest["quality"]))
    for answer in manifest.get("answers", []):
        console.print(f"Q: {answer['question']}", highlight=False, markup=False)
        console.print(f"A: {answer['answer'].strip()}", highlight=False, markup=False)
    print_path(console, "target", folder)
    return folder


def trace_stage(recipe: Recipe, console: Console, *, text: str | None = None, out: Path | None = None) -> Path:
    """Traces routing unless that is done, and prints expert load, union growth and speed."""
    from moexp.learn.trace.trace import trace_routing

    begin(recipe)
    target = find_target(recipe)
    folder = out or trace_folder(recipe, text)
    provenance = collect_provenance(recipe.seed)
    report = trace_routing(recipe, target, folder, work=draft_work(recipe), text=text, provenance=provenance)
    console.print(load_table(report))
    console.print()
    console.print(growth_table(report))
    manifest = report.trace.manifest
    speed = "" if report.tokens_per_s is None else f", {report.tokens_per_s:.0f} tokens/s"
    console.print(
        f"\n{manifest.tokens} tokens of {manifest.samples} samples, shards: {len(manifest.shards)}{speed} (measured)",
        highlight=False,
    )
    print_path(console, "trace", folder)
    return folder


def train_stage(recipe: Recipe, console: Console) -> Path:
    """Trains the draft experts unless that is done, and prints what they reach."""
    from moexp.learn.draft_expert.train import train_draft_expert
    from moexp.target.draft_expert import FILES

    begin(recipe)
    target, folder = find_target(recipe), locations.draft_folder(recipe)
    metrics = _saved_metrics(FILES, folder, target, "draft experts of another target are there", console)
    if metrics is None:
        metrics = train_draft_expert(recipe, target, folder, provenance=collect_provenance(recipe.seed))
    console.print(draft_table(metrics))
    print_path(console, "draft experts", folder)
    return folder


def _saved_metrics(
    files: TrainedFiles, folder: Path, target: Path, refusal: str, console: Console
) -> dict[str, Any] | None:
    """The metrics of what is trained already; None where it is not.

    Raises:
        MoexpError: with `refusal`: it was trained for another target.
    """
    from moexp.target.load import drafters_identity

    if not ranks.on_main((folder / files.header).exists):
        return None
    header = files.read_header(folder)
    if header["target"] != drafters_identity(target):
        raise MoexpError(refusal, where=str(folder), valid="remove the folder to train again")
    console.print("trained already", highlight=False)
    metrics: dict[str, Any] = header["metrics"]
    return metrics


def predictor_stage(recipe: Recipe, console: Console) -> Path:
    """Trains the expert predictor unless that is done, tracing first where needed; prints and saves what it reaches."""
    from moexp.learn.predictor.train import train_predictor
    from moexp.learn.trace.trace import trace_routing
    from moexp.runtime.predictors.files import FILES

    begin(recipe)
    target, folder = find_target(recipe), locations.predictor_folder(recipe)
    if _saved_metrics(FILES, folder, target, "a predictor of another target is there", console) is None:
        traced, text = locations.predictor_recipe(recipe), recipe.predictor.text
        trace, work, provenance = trace_folder(traced, text), draft_work(recipe), collect_provenance(recipe.seed)
        report = trace_routing(traced, target, trace, work=work, text=text, provenance=provenance)
        train_predictor(recipe, target, report.trace, folder, cache=locations.source_cache(), provenance=provenance)
    header = FILES.read_header(folder)
    console.print(predictor_table(header["metrics"]))
    for file in ranks.on_main(partial(write_predictor_summary, results_folder(recipe), recipe.name, header)):
        console.print(str(file), soft_wrap=True, highlight=False)
    print_path(console, "predictor", folder)
    return folder


def drafter_stage(recipe: Recipe, console: Console) -> Path:
    """Trains the recipe's draft head unless that is done, and prints what it reaches; GTO's start is trained first."""
    from moexp.learn.heads.train import train_head_of
    from moexp.target.heads import eagle_files, mtp_files

    begin(recipe)
    target, folder = find_target(recipe), locations.head_folder(recipe)
    if recipe.paths.head is not None:
        print_path(console, "published draft head", find_head(recipe))
        return find_head(recipe)
    start = None
    if recipe.head.kind == "gto":
        eagle = locations.with_head(recipe, "eagle3")
        start = locations.head_folder(eagle)
        if not ranks.on_main((start / eagle_files.HEADER).exists):
            drafter_stage(eagle, console)
    files = mtp_files.FILES if recipe.head.kind == "mtp" else eagle_files.FILES
    metrics = _saved_metrics(files, folder, target, "a head of another target is there", console)
    if metrics is None:
        metrics = train_head_of(recipe, target, folder, start=start, provenance=collect_provenance(recipe.seed))
    console.print(head_table(recipe.head.kind, metrics))
    print_path(console, "draft head", folder)
    return folder


def eval_stage(
    recipe: Recipe, console: Console, *, tokens: int | None = None, out: Path | None = None, skip: bool = False
) -> bool:
    """Runs the exactness gate, writes its results, prints its table; True if it was passed.

    Args:
        skip: do nothing where the gate was passed before with the same target, draft experts and recipe.
    """
    from moexp.bench.gate import already_passed, gate_identity, run_gate
    from moexp.target.draft_expert import HEADER

    begin(recipe)
    folder = out or results_folder(recipe)
    identity = gate_identity(recipe)
    if skip and already_passed(folder, identity):
        console.print("passed already", highlight=False)
        return True
    if not (locations.draft_folder(recipe) / HEADER).exists():
        console.print("draft experts are not trained: left out", highlight=False)
    gate = run_gate(recipe, tokens=tokens)
    files = write_gate(gate, folder, identity, collect_provenance(recipe.seed))
    console.print(gate_table(gate))
    for line in gate_lines(gate):
        console.print(line, highlight=False)
    for file in files:
        console.print(str(file), soft_wrap=True, highlight=False)
    return gate.passed


def corpus_stage(recipe: Recipe, console: Console, *, author: str, tokens: int, out: Path | None) -> Path:
    """Lets the dense model or the target write a corpus of `tokens` tokens."""
    from moexp.learn.corpus.files import Author, write_corpus

    begin(recipe)
    if author == "dense":
        from moexp.target.source import load_dense

        if recipe.target.kind != "carved":
            raise MoexpError("the target was not carved from a dense model", where="--author", valid="target")
        source = recipe.target
        dense = load_dense(source.source, cache=locations.source_cache(), path=source.path, revision=source.revision)
        model, tokenizer, section = dense.model, dense.tokenizer, recipe.target.corpus
    elif author == "target":
        from moexp.learn.core.experts import set_training_experts
        from moexp.learn.setup import load_with_experts

        model, tokenizer = load_with_experts(find_target(recipe), recipe.target.dtype)
        set_training_experts(model)
        section = recipe.draft.corpus
    else:
        raise MoexpError(f"unknown author {author!r}", where="--author", valid="dense, target")
    section = section.model_copy(update={"source": "write", "tokens": tokens})
    folder = out or home() / "corpora" / f"{recipe.name}-{author}"
    _check_corpus(folder, {"author": author, "length": section.length, "rows": section.rows, "seed": recipe.seed})
    files = write_corpus(section, Author(author, model, tokenizer), folder, recipe.seed)
    written = len(files) * section.rows * section.length
    console.print(f"{written} tokens by the {author} model in {len(files)} batches: {folder}", soft_wrap=True)
    return folder


def _check_corpus(folder: Path, settings: dict[str, Any]) -> None:
    """Batches that exist are used, so they must be of the same corpus.

    Raises:
        MoexpError: `folder` holds another one.
    """
    path = folder / "corpus.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        raise MoexpError("another corpus is there", where=str(folder), valid="another --out")
    write_json(path, settings)
