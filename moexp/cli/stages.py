"""The stages that commands run, each with what it prints: build, trace, train, check, and all of them in a row.

Every stage finds its input and leaves its output where `moexp.config.locations` says; what is done is not done again.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

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
from moexp.tables.trained.terminal import (
    draft_table,
    growth_table,
    head_table,
    load_table,
    predictor_table,
    quality_table,
)
from moexp.target.opening import find_head, find_target


def begin(recipe: Recipe) -> None:
    """Threads and allocator for this process, and no progress bars but our own."""
    prepare(recipe.threads)
    from transformers.utils import logging

    logging.disable_progress_bar()


# --- build-target ---


def build_stage(recipe: Recipe, console: Console) -> Path:
    """Builds the target unless it is there (a hub checkpoint is only fetched), and prints what was measured on it."""
    from moexp.learn.target.build import build_target, read_manifest

    begin(recipe)
    if recipe.target.kind == "hub":
        folder = find_target(recipe)
        console.print(f"a checkpoint, nothing to build: {folder}", soft_wrap=True, highlight=False)
        return folder
    folder = build_target(
        recipe,
        locations.target_folder(recipe),
        cache=locations.source_cache(),
        provenance=collect_provenance(recipe.seed),
    )
    manifest = read_manifest(folder)
    quality = manifest.get("quality", {})
    if quality:
        console.print(quality_table(quality))
    for answer in manifest.get("answers", []):
        console.print(f"Q: {answer['question']}", highlight=False, markup=False)
        console.print(f"A: {answer['answer'].strip()}", highlight=False, markup=False)
    console.print(f"target: {folder}", soft_wrap=True, highlight=False)
    return folder


# --- trace-routing ---


def trace_stage(recipe: Recipe, console: Console, *, text: str | None = None, out: Path | None = None) -> Path:
    """Traces routing unless that is done, and prints expert load, union growth and speed."""
    from moexp.learn.trace.trace import trace_routing

    begin(recipe)
    target = find_target(recipe)
    folder = out or trace_folder(recipe, text)
    report = trace_routing(
        recipe, target, folder, work=draft_work(recipe), text=text, provenance=collect_provenance(recipe.seed)
    )
    console.print(load_table(report))
    console.print()
    console.print(growth_table(report))
    manifest = report.trace.manifest
    speed = "" if report.tokens_per_s is None else f", {report.tokens_per_s:.0f} tokens/s"
    console.print(
        f"\n{manifest.tokens} tokens of {manifest.samples} samples, shards: {len(manifest.shards)}{speed} (measured)",
        highlight=False,
    )
    console.print(f"trace: {folder}", soft_wrap=True, highlight=False)
    return folder


# --- train-draft-expert ---


def train_stage(recipe: Recipe, console: Console) -> Path:
    """Trains the draft experts unless they are there, and prints what they reach."""
    from moexp.learn.draft_expert.train import train_draft_expert
    from moexp.target.draft_expert import HEADER, read_header

    begin(recipe)
    target, folder = find_target(recipe), locations.draft_folder(recipe)
    if ranks.on_main((folder / HEADER).exists):
        header = _kept(read_header(folder), target, folder, "draft experts of another target are there", console)
        metrics = header["metrics"]
    else:
        metrics = train_draft_expert(recipe, target, folder, provenance=collect_provenance(recipe.seed))
    console.print(draft_table(metrics))
    console.print(f"draft experts: {folder}", soft_wrap=True, highlight=False)
    return folder


def _kept(header: dict[str, Any], target: Path, folder: Path, others: str, console: Console) -> dict[str, Any]:
    """The header of what was trained before.

    Args:
        others: what is said where it was trained for another target.

    Raises:
        MoexpError: it was trained for another target.
    """
    from moexp.target.load import drafters_identity

    if header["target"] != drafters_identity(target):
        raise MoexpError(others, where=str(folder), valid="remove the folder to train again")
    console.print("trained already", highlight=False)
    return header


# --- train-predictor ---


def predictor_stage(recipe: Recipe, console: Console) -> Path:
    """Trains the expert predictor unless it is there, tracing first where need be; prints and keeps what it reaches."""
    from moexp.learn.predictor.train import train_predictor
    from moexp.learn.trace.trace import trace_routing
    from moexp.runtime.predictors.files import HEADER, read_header
    from moexp.tables.trained.files import write_predictor_summary

    begin(recipe)
    target, folder = find_target(recipe), locations.predictor_folder(recipe)
    if ranks.on_main((folder / HEADER).exists):
        _kept(read_header(folder), target, folder, "a predictor of another target is there", console)
    else:
        traced, text, made = locations.predictor_recipe(recipe), recipe.predictor.text, collect_provenance(recipe.seed)
        place = trace_folder(traced, text)
        report = trace_routing(traced, target, place, work=draft_work(recipe), text=text, provenance=made)
        train_predictor(recipe, target, report.trace, folder, cache=locations.source_cache(), provenance=made)
    header = read_header(folder)
    console.print(predictor_table(header["metrics"]))
    for file in ranks.on_main(partial(write_predictor_summary, results_folder(recipe), recipe.name, header)):
        console.print(str(file), soft_wrap=True, highlight=False)
    console.print(f"predictor: {folder}", soft_wrap=True, highlight=False)
    return folder


# --- train-drafter ---


def drafter_stage(recipe: Recipe, console: Console) -> Path:
    """Trains the recipe's draft head unless it is there, and prints what it reaches; GTO's start is trained first."""
    from moexp.learn.heads.train import train_head_of
    from moexp.target.heads import eagle_files, mtp_files

    begin(recipe)
    target, folder = find_target(recipe), locations.head_folder(recipe)
    if recipe.paths.head is not None:
        console.print(f"published draft head: {find_head(recipe)}", soft_wrap=True, highlight=False)
        return find_head(recipe)
    start = None
    if recipe.head.kind == "gto":
        eagle = locations.with_head(recipe, "eagle3")
        start = locations.head_folder(eagle)
        if not ranks.on_main((start / eagle_files.HEADER).exists):
            drafter_stage(eagle, console)
    file = folder / (mtp_files.HEADER if recipe.head.kind == "mtp" else eagle_files.HEADER)
    if ranks.on_main(file.exists):
        header = _kept(json.loads(file.read_text()), target, folder, "a head of another target is there", console)
        metrics = header["metrics"]
    else:
        provenance = collect_provenance(recipe.seed)
        metrics = train_head_of(recipe, target, folder, start=start, provenance=provenance)
    console.print(head_table(recipe.head.kind, metrics))
    console.print(f"draft head: {folder}", soft_wrap=True, highlight=False)
    return folder


# --- eval ---


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


# --- write-corpus ---


def corpus_stage(recipe: Recipe, console: Console, *, author: str, tokens: int, out: Path | None) -> Path:
    """Lets the dense model or the target write a corpus of `tokens` tokens."""
    from moexp.learn.corpus.files import write_corpus

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
    place = out or home() / "corpora" / f"{recipe.name}-{author}"
    _claim(place, {"author": author, "length": section.length, "rows": section.rows, "seed": recipe.seed})
    files = write_corpus(section, model, tokenizer, place, author=author, seed=recipe.seed)
    written = len(files) * section.rows * section.length
    console.print(f"{written} tokens by the {author} model in {len(files)} batches: {place}", soft_wrap=True)
    return place


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Batches that are there are kept, so they must be of the same corpus.

    Raises:
        MoexpError: `folder` holds another one.
    """
    path = folder / "corpus.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        raise MoexpError("another corpus is there", where=str(folder), valid="another --out")
    write_json(path, settings)
