"""`moexp train-predictor`: the expert predictor learns from a routing trace.

Its head begins with least squares from the backbone's output to the routed experts: one pass over a few ten thousand
tokens, where gradient steps take many.

Shapes: P tokens of a batch, H hidden size, O = L E logits of L MoE layers, k experts a token.
"""

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
from moexp.base.ridge import solve_ridge
from moexp.config.recipe import Recipe
from moexp.data.traces import Trace
from moexp.learn.core.loop import UNSAVED, Metrics, Run, own_rows, train
from moexp.learn.core.optimizers import Updates
from moexp.learn.corpus.files import tokenizer_id
from moexp.learn.predictor.data import batch_of, read_rows
from moexp.learn.predictor.lesson import Lesson, Levels, baseline_hits, evaluate, lesson_of
from moexp.learn.predictor.loss import backbone_states, routing_logits, routing_loss
from moexp.learn.setup import work_folder
from moexp.runtime.predictors.backbone import open_backbone
from moexp.runtime.predictors.files import load_predictor, target_embedding, write_predictor
from moexp.runtime.predictors.learned import RoutingPredictor
from moexp.target.tokenizer import load_tokenizer

PREDICTOR = "predictor"  # its own name beside those of the baselines
PROBE_EVERY = 4  # steps
RIDGE = 1e-3  # added to the diagonal, over its mean
SCALES = (1, 2, 3, 4, 6, 8, 12, 16)  # of the fitted shares, as logits


@torch.no_grad()
def fit_head(model: RoutingPredictor, lesson: Lesson, tokens: int, levels: Levels | None = None) -> int:
    """Sets the head's weights by ridge regression on the backbone's output; returns the tokens, about `tokens`.

    Solved after 1, 2, 3, 4, 6, 9, ... rows too, up to a batch more, so that `levels` is offered weaker heads. The last
    batch of rows sets the scale of the logits.
    """
    model.eval()
    rows, batch = lesson.rows, lesson.batch
    order_R = np.random.default_rng(lesson.seed).permutation(lesson.train_R)
    scale_R, order_R = order_R[-batch:], order_R[:-batch] if len(order_R) > batch else order_R
    size = model.head.weight.shape[1] + 1
    gram_HH = torch.zeros(size, size, dtype=torch.float64, device=model.device)
    mixed_HO = gram_HH.new_zeros(size, model.head.weight.shape[0])
    done = seen = 0
    with stage("Expert predictor, linear start", None):
        while done < len(order_R) and seen < tokens:
            chosen_R = order_R[done : done + max(1, min(done // 2, batch))]
            part = batch_of(rows, chosen_R).to(model.device)
            hidden_PH = backbone_states(model, part, lesson.dtype)
            with_one_PH = torch.cat([hidden_PH.float(), hidden_PH.new_ones(len(hidden_PH), 1).float()], dim=1)
            gram_HH += (with_one_PH.T @ with_one_PH).double()
            mixed_HO += (with_one_PH.T @ _multi_hot(part.experts_PLk, rows.geometry.num_experts)).double()
            done, seen = done + len(chosen_R), seen + len(part.experts_PLk)
            is_last = done >= len(order_R) or seen >= tokens
            if is_last or len(chosen_R) < batch:
                solved_HO = solve_ridge(gram_HH, mixed_HO, RIDGE)
                model.head.weight.copy_(solved_HO[:-1].T)
                model.head.bias.copy_(solved_HO[-1])
                _scale_head(model, lesson, scale_R)
                if levels is not None:
                    levels.offer(model, lesson.probe(model), 0)
    return seen


def _scale_head(model: RoutingPredictor, lesson: Lesson, scale_R: np.ndarray) -> None:
    """Shares become logits: times the factor at which the loss is least. Their order stays."""
    part = batch_of(lesson.rows, scale_R).to(model.device)
    logits_PLE = model.logits(backbone_states(model, part, lesson.dtype))
    best = min(SCALES, key=lambda scale: float(routing_loss(scale * logits_PLE, part.experts_PLk)))
    model.head.weight.mul_(best)
    model.head.bias.mul_(best)


def _multi_hot(experts_PLk: Tensor, num_experts: int) -> Tensor:
    """[P, O]: 1 where an expert was routed to."""
    tokens, layers, _ = experts_PLk.shape
    return torch.zeros(tokens, layers, num_experts, device=experts_PLk.device).scatter_(2, experts_PLk, 1.0).flatten(1)


def fit(
    model: RoutingPredictor,
    lesson: Lesson,
    *,
    levels: Levels | None = None,
    log: list[dict[str, Any]] | None = None,
    run: Run = UNSAVED,
) -> int:
    """Trains in place; returns the steps taken. `log` receives a record a probe.

    A step's rows and dropout depend on its number alone, so a resumed run ends with the same weights; each of several
    processes drops out by its own masks.
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
    """Trains the recipe's predictor on a trace of the target in `target` and saves it in `out`; returns its metrics.

    `cache` is the folder of the dense models that targets are carved from.

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
