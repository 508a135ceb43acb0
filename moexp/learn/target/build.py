"""`moexp build-target`: dense weights -> carved -> repaired -> a standard checkpoint folder with its measurements.

Shapes: N rows, L tokens a row.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Glm4MoeForCausalLM

from moexp.base.atomic import new_folder, write_json
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.config.locations import padded_beside
from moexp.config.recipe import Recipe
from moexp.config.target import TargetSection
from moexp.learn.core.loop import Run, Schedule, followed
from moexp.learn.corpus.files import Author, corpus_rows
from moexp.learn.setup import work_folder
from moexp.learn.target.quality import measure_quality, sample_answers
from moexp.learn.target.repair import RepairSettings, prepare, repair_end_to_end, repair_layerwise
from moexp.target.carve import Geometry, calibrate, carve
from moexp.target.delta import Rebuilt, apply_delta, coded_bases, find_delta, save_delta
from moexp.target.pad import pad_experts
from moexp.target.source import Dense, load_dense
from moexp.target.tiny import TinyTarget, build_tiny_target

MANIFEST = "moexp_target.json"
DELTA = "repair.delta"  # no .safetensors: loaders must not take it for a shard
HELD_OUT_ROWS = 24


def build_target(recipe: Recipe, folder: Path, *, cache: Path, provenance: dict[str, Any]) -> Path:
    """Builds the recipe's target in `folder` unless that is done; gives the folder to decode from (perhaps padded)."""
    section = recipe.target
    if section.kind == "tiny":
        if not (folder / "config.json").exists():
            _build_tiny(section, folder, recipe.seed)
    elif section.kind == "hub":
        raise MoexpError("nothing to build: the target is a checkpoint", where="target.kind", valid="carved or tiny")
    elif not (folder / MANIFEST).exists():
        _build_carved(recipe, folder, cache, provenance)
    if section.pad_expert_width is None:
        return folder
    padded = padded_beside(folder, section.pad_expert_width)
    if not (padded / "config.json").exists():
        with stage(f"Pad experts to {section.pad_expert_width}", None) as advance:
            pad_experts(folder, padded, section.pad_expert_width, advance)
    return padded


def _build_tiny(section: TargetSection, folder: Path, seed: int) -> None:
    tiny = section.tiny
    wanted = TinyTarget(
        seed=seed,
        hidden=tiny.hidden_size,
        layers=tiny.num_layers,
        experts=tiny.num_experts,
        top_k=tiny.top_k,
        shared=tiny.num_shared_experts,
        expert_width=tiny.expert_width,
        vocab=tiny.vocab_size,
        model_type=tiny.model_type,
        first_dense=tiny.first_dense,
    )
    with new_folder(folder) as into:
        build_tiny_target(into, wanted)


def _build_carved(recipe: Recipe, folder: Path, cache: Path, provenance: dict[str, Any]) -> None:
    section = recipe.target
    work = work_folder(folder)
    with stage("Dense model", None):
        dense = load_dense(section.source, cache=cache, path=section.path, revision=section.revision)
    geometry = Geometry(**section.carve.model_dump(exclude={"calibration_tokens"}))
    geometry.neurons_per_expert(dense.model.config.intermediate_size)  # a bad one is known before any work
    author = Author("dense", dense.model, dense.tokenizer)
    rows_NL = corpus_rows(section.corpus, author, work / "corpus", recipe.seed)
    held_NL, train_NL = rows_NL[:HELD_OUT_ROWS], rows_NL[HELD_OUT_ROWS:]
    manifest: dict[str, Any] = {"origin": dense.origin, "geometry": section.carve.model_dump(), "delta": section.delta}
    quality: dict[str, Any] = {}
    delta = None
    if section.delta is not None:
        rebuilt = _apply_delta(section.delta, dense, geometry)
        model, manifest["repair"] = rebuilt.model, rebuilt.details
    else:
        if section.repair.start is not None:
            name, start = "start", _apply_delta(section.repair.start, dense, geometry)
        else:
            name, start = "carved", _carve(dense, train_NL, geometry, section.carve.calibration_tokens)
        model = start.model
        quality[name] = asdict(measure_quality(model, dense.model, held_NL))
        settings = _repair_settings(recipe, seed=recipe.seed + 1000 * repairs_before(start.details))
        _repair(start, dense, train_NL, recipe, settings, work / "repair")
        repair, earlier = section.repair.model_dump(mode="json"), start.details or None
        manifest["repair"] = {"tokens": train_NL.numel(), **repair, "earlier": earlier}
        if section.repair.delta is not None:
            delta, density = work / DELTA, section.repair.delta.density
            save_delta(delta, model, dense.model, start.plans, geometry, density, manifest["repair"])
            model = apply_delta(delta, dense.model, geometry).model  # what a build from it gets, to the bit
    model = model.eval().bfloat16()
    with stage("Measure quality", None):
        repaired = measure_quality(model, dense.model, held_NL)
        quality["repaired"] = asdict(repaired)
        answers = sample_answers(model, dense.tokenizer)
    if dead := sum(repaired.dead_experts):  # not an error: a short build may leave some, and the manifest says so
        with stage(f"warning: {dead} experts were not chosen on held-out text", None):
            pass
    manifest |= {"quality": quality, "answers": answers, "provenance": provenance}
    _save(model, dense, folder, manifest, delta)
    shutil.rmtree(work / "repair", ignore_errors=True)  # weights and moments of every stage: a gigabyte and more


def _apply_delta(name: str, dense: Dense, geometry: Geometry) -> Rebuilt:
    with stage("Apply the delta", None):
        return apply_delta(find_delta(name), dense.model, geometry)


def _carve(dense: Dense, train_NL: Tensor, geometry: Geometry, calibration_tokens: int) -> Rebuilt:
    layers = range(1, dense.model.config.num_hidden_layers)
    rows = max(1, calibration_tokens // train_NL.shape[1])
    with stage("Calibrate", None):
        calibration = calibrate(dense.model, iter(train_NL[:rows].long().split(8)), layers)
    with stage("Carve", len(layers)) as advance:
        model, plans = carve(dense.model, calibration, geometry, advance)
    return Rebuilt(model, plans, coded_bases(model), details={})


def _repair(
    rebuilt: Rebuilt, dense: Dense, train_NL: Tensor, recipe: Recipe, settings: RepairSettings, folder: Path
) -> None:
    """All stages, in place; checkpoints lie in `folder`."""
    model, identity = rebuilt.model, recipe.digest("target", "seed")
    prepare(model, recipe.target.repair.scope)
    # the checkpoint of a stage already holds what those before it learned
    second, third = folder / "end-to-end", folder / "delta"
    shown = ("kl", "agreement", "moved")
    if not second.exists() and not third.exists():
        with followed("Repair, layer by layer", settings.layerwise.steps, "residual") as on_step:
            run = Run(folder / "layer-wise", identity, on_step)
            repair_layerwise(model, dense.model, rebuilt.plans, train_NL, settings, run=run)
    if not third.exists():
        with followed("Repair, end to end", settings.end_to_end.steps, *shown) as on_step:
            repair_end_to_end(model, dense.model, train_NL, settings, run=Run(second, identity, on_step))
    if settings.delta is not None:
        with followed("Repair, as the delta will be", settings.delta.steps, *shown) as on_step:
            run = Run(third, identity, on_step)
            repair_end_to_end(model, dense.model, train_NL, settings, rebuilt.bases, run=run)


def repairs_before(details: dict[str, Any]) -> int:
    """How many repairs a delta went through. One that goes on sees the corpus in an order of its own."""
    count, earlier = 0, details
    while earlier:
        count, earlier = count + 1, earlier.get("earlier") or {}
    return count


def _repair_settings(recipe: Recipe, seed: int) -> RepairSettings:
    section, delta = recipe.target.repair, recipe.target.repair.delta
    cap = section.max_minutes
    layerwise_share, delta_share = 0.3 if delta else 0.35, 0.25 if delta else 0.0
    rest = 1 - layerwise_share - delta_share
    return RepairSettings(
        layerwise=Schedule(section.layerwise_steps, section.layerwise_lr, max_minutes=cap and cap * layerwise_share),
        end_to_end=Schedule(section.e2e_steps, section.e2e_lr, max_minutes=cap and cap * rest),
        delta=Schedule(delta.steps, delta.lr, max_minutes=cap and cap * delta_share) if delta else None,
        density=delta.density if delta else 0.0,
        seed=seed,
        **section.model_dump(include={"layerwise_rows", "rows", "router_weight", "bias_rate", "locality"}),
    )


def _save(model: Glm4MoeForCausalLM, dense: Dense, folder: Path, manifest: dict[str, Any], delta: Path | None) -> None:
    for gate_bias in (m for name, m in model.named_buffers() if name.endswith("e_score_correction_bias")):
        gate_bias.data = gate_bias.data.float()
    with new_folder(folder) as into:
        model.save_pretrained(into, max_shard_size="20GB")
        dense.tokenizer.save_pretrained(into)
        write_json(into / MANIFEST, manifest)
        if delta is not None:
            shutil.move(delta, into / DELTA)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `build-target` recorded about the target in `folder` or its padded copy; empty if nothing."""
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.exists() else {}
