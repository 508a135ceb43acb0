"""`moexp train-predictor`: the expert predictor learns from a routing trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moexp.base import ranks
from moexp.base.atomic import new_folder, recover_folder
from moexp.base.devices import training_device
from moexp.base.progress import note_of, stage
from moexp.config.recipe import Recipe
from moexp.data.traces import Trace
from moexp.learn.core.loop import UNSAVED, Metrics, Run, own_rows, train
from moexp.learn.core.optimizers import Updates
from moexp.learn.corpus.files import tokenizer_id
from moexp.learn.predictor.baselines import baseline_hits
from moexp.learn.predictor.data import batch_of, read_rows
from moexp.learn.predictor.lesson import Lesson, Levels, evaluate, lesson_of
from moexp.learn.predictor.loss import routing_logits, routing_loss
from moexp.learn.predictor.start import fit_head
from moexp.learn.setup import work_folder
from moexp.runtime.predictors.backbone import open_backbone
from moexp.runtime.predictors.files import load_predictor, target_embedding, write_predictor
from moexp.runtime.predictors.learned import RoutingPredictor
from moexp.target.tokenizer import load_tokenizer

PREDICTOR = "predictor"  # its own name beside those of the baselines
PROBE_EVERY = 4  # steps


def fit(
    model: RoutingPredictor,
    lesson: Lesson,
    *,
    levels: Levels | None = None,
    log: list[dict[str, Any]] | None = None,
    run: Run = UNSAVED,
) -> int:
    """Trains in place; returns the steps taken. `log` receives a record a probe.

    A step depends on its number alone (rows and dropout), so that a resumed run ends with the same weights. Each of
    several processes drops out by masks of its own, so a run they share equals one process's only without dropout.
    """
    last: Metrics = {}

    def step_fn(step: int) -> Metrics:
        model.train()
        torch.manual_seed(lesson.seed * 1_000_003 + step + ranks.rank() * 1_000_000_007)
        chosen_R = own_rows(torch.from_numpy(lesson.train_R), lesson.batch, step, lesson.seed)
        part = batch_of(lesson.rows, chosen_R.numpy()).to(model.device)
        logits_PLE = routing_logits(model, part, lesson.dtype)
        loss = routing_loss(logits_PLE, part.experts_PLk) / ranks.mean(part.experts_PLk[..., 0].numel())
        loss.backward()
        return {"loss": float(loss.detach())}

    with stage("Expert predictor", lesson.schedule.steps) as advance:

        def on_step(step: int, metrics: Metrics) -> None:
            last.update(metrics)
            if not ranks.is_main():
                return
            if step % PROBE_EVERY == 0 or step == lesson.schedule.steps:
                last["overlap"] = lesson.probe(model)
                if levels is not None:
                    levels.offer(model, last["overlap"], step)
                if log is not None:
                    log.append({"step": step, **last})
            advance(step, note_of(last, "loss", "overlap"))

        updates = Updates(lesson.optimizer, betas=(0.9, 0.999), lr_scale={"backbone.": lesson.backbone_rate})
        watched = Run(run.checkpoint, run.identity, on_step)
        return train(model.trainable(), lesson.schedule, step_fn, updates, watched)


def train_predictor(
    recipe: Recipe, target: Path, trace: Trace, out: Path, *, cache: Path, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Trains the recipe's predictor on a trace of the target in `target`, measures it and the baselines, saves it.

    Args:
        out: the predictor's folder; beside it, until it is done, a `.work` folder to resume from.
        cache: folder of the dense models that targets are carved from.

    Returns:
        the metrics: tokens and samples held out, hits of each predictor by layer, their overlap, and the overlap of
        the checkpoints that were saved on the way.

    Raises:
        MoexpError: a trace of another vocabulary or of one sample only, a backbone that cannot be opened.

    Paper: EcoSpec section 4.1.
    """
    section, identity, work = recipe.predictor, trace.manifest.target, work_folder(out)
    with stage("Read the trace", None):
        embedding_VD = target_embedding(target)
        lesson = lesson_of(recipe, read_rows(trace, section.context, len(embedding_VD)))
    torch.manual_seed(recipe.seed)
    backbone, device = open_backbone(recipe, cache), training_device(recipe.device)
    model = RoutingPredictor(
        backbone, embedding_VD, trace.geometry, context=section.context, dropout=section.dropout
    ).to(device)
    ranks.on_main(lambda: _remove_unfinished(work))
    levels = Levels(work / "levels", identity)
    if section.start_tokens and not (work / "state").exists():
        ranks.on_main(lambda: fit_head(model, lesson, section.start_tokens, levels))  # the others take its weights
    log: list[dict[str, Any]] = []
    run = Run(work / "state", f"{identity}:{trace.manifest.identity}:{recipe.digest('predictor', 'seed')}")
    steps = fit(model, lesson, levels=levels, log=log, run=run)

    def finish() -> dict[str, Any]:
        model.cast(torch.bfloat16).cast(torch.float32)  # measured as it is saved
        with stage("Measure on held-out samples", None):
            metrics = _measure(model, lesson, levels, embedding_VD)
        details = {
            "tokenizer": tokenizer_id(load_tokenizer(target)),
            "metrics": metrics,
            "training": {
                "tokens": lesson.tokens(lesson.train_R),
                "steps": steps,
                "last": log[-1] if log else None,
                "trace": trace.manifest.identity,
                "parameters": sum(parameter.numel() for parameter in model.trainable().values()),
            },
            "recipe": section.model_dump(mode="json"),
            "provenance": provenance,
        }
        with new_folder(out) as temp:
            for name, folder in levels.saved().items():
                shutil.copytree(folder, temp / name)
            write_predictor(temp, model, identity, details)
        shutil.rmtree(work, ignore_errors=True)
        return metrics

    return ranks.on_main(finish)


def _remove_unfinished(work: Path) -> None:
    """Removes the levels of a run that left no state to resume from."""
    recover_folder(work / "state")
    if not (work / "state").exists():
        shutil.rmtree(work, ignore_errors=True)


def _measure(model: RoutingPredictor, lesson: Lesson, levels: Levels, embedding_VD: Tensor) -> dict[str, Any]:
    rows, held_R = lesson.rows, lesson.held_R
    saved = {name: load_predictor(folder, levels.target, embedding_VD) for name, folder in levels.saved().items()}
    hits = {PREDICTOR: evaluate(model, lesson, held_R), **baseline_hits(rows, lesson.train_R, held_R)}
    return {
        "tokens": lesson.tokens(held_R),
        "samples": len(np.unique(rows.sample_R[held_R])),
        "top_k": rows.geometry.top_k,
        "layers": list(rows.geometry.layers),
        "hits": {name: hits_L.tolist() for name, hits_L in hits.items()},
        "overlap": {name: lesson.overlap(hits_L, held_R) for name, hits_L in hits.items()},
        "levels": {name: lesson.overlap(evaluate(level, lesson, held_R), held_R) for name, level in saved.items()},
    }
