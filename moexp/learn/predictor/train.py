"""`moexp train-predictor`: the expert predictor learns from a routing trace (EcoSpec, section 4.1 and appendix B.1).

Shapes: B rows, T tokens, P tokens of a batch, L MoE layers, E experts a layer, k experts a token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moexp.base import ranks
from moexp.base.atomic import new_folder, recover_folder
from moexp.base.compute import training_device
from moexp.base.progress import note_of, stage
from moexp.config.recipe import Recipe
from moexp.data.traces import Trace
from moexp.learn.core.loop import Metrics, Schedule, own_rows, train
from moexp.learn.core.optimizers import OptimizerName
from moexp.learn.corpus.files import tokenizer_id
from moexp.learn.predictor.baselines import baseline_hits
from moexp.learn.predictor.data import RoutingBatch, RoutingRows, batch_of, read_rows, split_rows
from moexp.learn.predictor.start import fit_head
from moexp.runtime.predictors.backbone import open_backbone
from moexp.runtime.predictors.files import HEADER, load_predictor, read_header, target_embedding, write_predictor
from moexp.runtime.predictors.learned import RoutingPredictor, top_experts

PREDICTOR = "predictor"  # its own name beside those of the baselines
LEVELS = {"near-50": 0.5, "near-60": 0.6}  # overlaps to keep a checkpoint at (Table 9), by folder
NEAR = 0.05  # a checkpoint further off than this is not kept
NEARER = 0.005  # by which another must beat the one that is kept: a large backbone is not written at every probe
PROBE_EVERY = 4  # steps
PROBE_TOKENS = 2048  # held-out tokens that tell how far training is


def routing_loss(logits_TLE: Tensor, experts_TLk: Tensor) -> Tensor:
    """Layer-wise cross-entropy (equation 6) against 1/K on each routed expert (equation 5), summed over T and L.

    Neither q nor log p is ever built: with q uniform over the routed experts, a term is logsumexp z - mean z_routed.
    """
    mean_TL = logits_TLE.gather(-1, experts_TLk).mean(-1)
    return (logits_TLE.logsumexp(-1) - mean_TL).sum()


def overlap_hits(predicted_TLk: Tensor, routed_TLk: Tensor) -> Tensor:
    """How many routed experts of each layer were predicted, [L]."""
    same_TLkk = predicted_TLk[..., :, None] == routed_TLk[..., None, :]
    return same_TLkk.sum((0, 2, 3))


def routing_logits(model: RoutingPredictor, ids_BT: Tensor, live_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [P, L, E] of the live tokens; matrix products in `dtype`, the rest as the weights are."""
    with _products(ids_BT, dtype):
        hidden_BTH = model.hidden(ids_BT)
        return model.logits(hidden_BTH[live_BT])


def _products(ids_BT: Tensor, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(ids_BT.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


@torch.no_grad()
def evaluate(
    model: RoutingPredictor, rows: RoutingRows, chosen: Sequence[int] | np.ndarray, *, batch: int, dtype: torch.dtype
) -> np.ndarray:
    """Hits [L] of the predictor on these rows; over `tokens * k` they are the overlap (appendix B.1)."""
    model.eval()
    hits_L = torch.zeros(len(rows.geometry.layers), dtype=torch.int64)
    for begin in range(0, len(chosen), batch):
        part = batch_of(rows, chosen[begin : begin + batch]).to(model.device)
        logits_PLE = routing_logits(model, part.ids_BT, part.live_BT, dtype)
        hits_L += overlap_hits(top_experts(logits_PLE, rows.geometry.top_k), part.experts_PLk).cpu()
    return hits_L.numpy()


def overlap(hits_L: np.ndarray, tokens: int, top_k: int) -> float:
    """Mean top-K overlap over tokens and layers."""
    return float(hits_L.sum() / (tokens * top_k * len(hits_L)))


@dataclass
class LevelKeeper:
    """Keeps, for each level, the checkpoint whose overlap on the probe came nearest (to within `NEARER`).

    On disk from the first: a run that resumes takes up what it had, and the same steps give the same checkpoints.
    """

    folder: Path
    target: str

    def offer(self, model: RoutingPredictor, reached: float, step: int) -> None:
        """The predictor after `step` steps, at this overlap."""
        for name, level in LEVELS.items():
            kept = self.folder / name
            best = abs(read_header(kept)["probe"] - level) if (kept / HEADER).exists() else NEAR + NEARER
            if abs(reached - level) <= best - NEARER:
                with new_folder(kept) as temp:
                    write_predictor(temp, model, self.target, {"probe": reached, "steps": step})

    def kept(self) -> list[str]:
        """The levels that were met."""
        return [name for name in LEVELS if (self.folder / name / HEADER).exists()]


@dataclass(frozen=True)
class Lesson:
    """What to learn from, and how: plain values of the recipe's section."""

    rows: RoutingRows
    train_R: np.ndarray
    held_R: np.ndarray
    schedule: Schedule
    batch: int
    dtype: torch.dtype
    backbone_rate: float
    seed: int
    optimizer: OptimizerName = "adamw"

    def tokens(self, chosen: np.ndarray) -> int:
        """Tokens of these rows."""
        return int((self.rows.end_R[chosen] - self.rows.begin_R[chosen]).sum())

    @property
    def probe_R(self) -> np.ndarray:
        """Held-out rows of `PROBE_TOKENS` tokens from all over the trace, or all."""
        mixed_R = np.random.default_rng(self.seed).permutation(self.held_R)
        ends = np.cumsum(self.rows.end_R[mixed_R] - self.rows.begin_R[mixed_R])
        return mixed_R[: int(np.searchsorted(ends, PROBE_TOKENS)) + 1]


def fit(
    model: RoutingPredictor,
    lesson: Lesson,
    *,
    levels: LevelKeeper | None = None,
    checkpoint: Path | None = None,
    identity: str = "",
    log: list[dict[str, Any]] | None = None,
) -> int:
    """Trains in place; returns the steps taken. `log` receives a record a probe.

    A step depends on its number alone (rows and dropout), so that a resumed run ends with the same weights. Each of
    several processes drops out by masks of its own, so a run they share equals one process's only without dropout.
    """
    rows, top_k = lesson.rows, lesson.rows.geometry.top_k
    probe_R = lesson.probe_R
    note: Metrics = {}

    def step_fn(step: int) -> Metrics:
        model.train()
        torch.manual_seed(lesson.seed * 1_000_003 + step + ranks.rank() * 1_000_000_007)
        chosen = lesson.train_R[own_rows(len(lesson.train_R), lesson.batch, step, lesson.seed).numpy()]
        part = batch_of(rows, chosen).to(model.device)
        logits_PLE = routing_logits(model, part.ids_BT, part.live_BT, lesson.dtype)
        loss = routing_loss(logits_PLE, part.experts_PLk) / ranks.mean(part.experts_PLk[..., 0].numel())
        loss.backward()
        return {"loss": float(loss.detach())}

    with stage("Expert predictor", lesson.schedule.steps) as advance:

        def on_step(step: int, metrics: Metrics) -> None:
            note.update(metrics)
            if not ranks.is_main():
                return
            if step % PROBE_EVERY == 0 or step == lesson.schedule.steps:
                hits_L = evaluate(model, rows, probe_R, batch=lesson.batch, dtype=lesson.dtype)
                note["overlap"] = overlap(hits_L, lesson.tokens(probe_R), top_k)
                if levels is not None:
                    levels.offer(model, note["overlap"], step)
                if log is not None:
                    log.append({"step": step, **note})
            advance(step, note_of(note, *(name for name in ("loss", "overlap") if name in note)))

        return train(
            model.trainable(),
            lesson.schedule,
            step_fn,
            lr_scale={"backbone.": lesson.backbone_rate},
            optimizer=lesson.optimizer,
            betas=(0.9, 0.999),
            checkpoint=checkpoint,
            identity=identity,
            on_step=on_step,
        )


def start(model: RoutingPredictor, lesson: Lesson, tokens: int, levels: LevelKeeper | None = None) -> int:
    """Fits the head to about so many training tokens in closed form; returns how many. `levels` sees every fit."""
    probe_R, top_k = lesson.probe_R, lesson.rows.geometry.top_k

    def hidden(model: RoutingPredictor, part: RoutingBatch) -> Tensor:
        with _products(part.ids_BT, lesson.dtype):
            return model.hidden(part.ids_BT)[part.live_BT]

    def offer(_: int) -> None:
        if levels is not None:
            hits_L = evaluate(model, lesson.rows, probe_R, batch=lesson.batch, dtype=lesson.dtype)
            levels.offer(model, overlap(hits_L, lesson.tokens(probe_R), top_k), 0)

    order_R = np.random.default_rng(lesson.seed).permutation(lesson.train_R)
    return fit_head(
        model, lesson.rows, order_R, tokens=tokens, batch=lesson.batch, hidden=hidden, loss=routing_loss, on_fit=offer
    )


def lesson_of(recipe: Recipe, rows: RoutingRows) -> Lesson:
    """The recipe's section, over these rows."""
    section = recipe.predictor
    train_R, held_R = split_rows(rows, section.held_out, recipe.seed)
    steps = section.epochs * max(1, len(train_R) // section.batch)
    return Lesson(
        rows=rows,
        train_R=train_R,
        held_R=held_R,
        schedule=Schedule(steps, section.lr, max_minutes=section.max_minutes),
        batch=section.batch,
        dtype=getattr(torch, section.dtype),
        backbone_rate=section.backbone_rate,
        optimizer=section.optimizer,
        seed=recipe.seed,
    )


def train_predictor(
    recipe: Recipe, target: Path, trace: Trace, out: Path, *, cache: Path, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Trains the recipe's predictor on a trace of the target in `target`, measures it and the baselines, saves it.

    Args:
        out: the predictor's folder; beside it, until it is done, a `.work` folder to resume from.
        cache: where what the target was carved from is kept.

    Returns:
        the metrics: tokens and samples held out, hits of each predictor by layer, their overlap, and the overlap of
        the checkpoints that were kept on the way.

    Raises:
        MoexpError: a trace of another vocabulary or of one sample only, a backbone that cannot be had.
    """
    from moexp.target.tokenizer import load_tokenizer

    section, identity = recipe.predictor, trace.manifest.target
    work = out.with_name(out.name + ".work")
    with stage("Read the trace", None):
        embedding_VD = target_embedding(target)
        rows = read_rows(trace, section.context, len(embedding_VD))
    lesson = lesson_of(recipe, rows)
    torch.manual_seed(recipe.seed)
    model = RoutingPredictor(
        open_backbone(recipe, cache),
        embedding_VD,
        trace.geometry,
        context=section.context,
        dropout=section.dropout,
    ).to(training_device(recipe.device))

    def clean() -> None:
        recover_folder(work / "state")
        if not (work / "state").exists():
            shutil.rmtree(work, ignore_errors=True)  # checkpoints of a run that left no state to resume from

    ranks.on_main(clean)
    levels = LevelKeeper(work / "levels", identity)
    if section.start_tokens and not (work / "state").exists():
        ranks.on_main(lambda: start(model, lesson, section.start_tokens, levels))  # the others take its weights
    log: list[dict[str, Any]] = []
    steps = fit(
        model,
        lesson,
        levels=levels,
        checkpoint=work / "state",
        identity=f"{identity}:{trace.manifest.identity}:{recipe.digest('predictor', 'seed')}",
        log=log,
    )

    def finish() -> dict[str, Any]:
        model.cast(torch.bfloat16).cast(torch.float32)  # measured as it is saved
        with stage("Measure on held-out samples", None):
            metrics = _measure(model, lesson)
            metrics["levels"] = {}
            for name in levels.kept():
                kept = load_predictor(levels.folder / name, identity, embedding_VD)
                hits_L = evaluate(kept, rows, lesson.held_R, batch=lesson.batch, dtype=lesson.dtype)
                metrics["levels"][name] = overlap(hits_L, metrics["tokens"], rows.geometry.top_k)
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
            "recipe": json.loads(section.model_dump_json()),
            "provenance": provenance,
        }
        with new_folder(out) as temp:
            for name in levels.kept():
                shutil.copytree(levels.folder / name, temp / name)
            write_predictor(temp, model, identity, details)
        shutil.rmtree(work, ignore_errors=True)
        return metrics

    return ranks.on_main(finish)


def _measure(model: RoutingPredictor, lesson: Lesson) -> dict[str, Any]:
    rows, held_R = lesson.rows, lesson.held_R
    tokens, top_k = lesson.tokens(held_R), rows.geometry.top_k
    hits = {
        PREDICTOR: evaluate(model, rows, held_R, batch=lesson.batch, dtype=lesson.dtype),
        **baseline_hits(rows, lesson.train_R, held_R),
    }
    return {
        "tokens": tokens,
        "samples": len(np.unique(rows.sample_R[held_R])),
        "top_k": top_k,
        "layers": list(rows.geometry.layers),
        "hits": {name: hits_L.tolist() for name, hits_L in hits.items()},
        "overlap": {name: overlap(hits_L, tokens, top_k) for name, hits_L in hits.items()},
    }
