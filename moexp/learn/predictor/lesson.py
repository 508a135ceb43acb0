"""What a predictor learns from, how far it is beside baselines without a model, and the checkpoints on the way.

Overlap is hits (experts both predicted and routed to) over all routed ones (EcoSpec, appendix B.1).

Shapes: R rows, T tokens, L MoE layers, E experts a layer, k experts a token, U different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moexp.base.atomic import new_folder
from moexp.config.recipe import Recipe
from moexp.learn.core.loop import Schedule
from moexp.learn.core.optimizers import OptimizerName
from moexp.learn.predictor.data import RoutingRows, batch_of, split_rows
from moexp.learn.predictor.loss import overlap_hits, routing_logits
from moexp.runtime.predictors.files import HEADER, read_header, write_predictor
from moexp.runtime.predictors.learned import RoutingPredictor, top_experts

LEVELS = {"near-50": 0.5, "near-60": 0.6}  # overlaps to save a checkpoint at (Table 9), by folder
NEAR = 0.05  # a checkpoint further off than this is not saved
NEARER = 0.005  # by which another must beat the saved one: a large backbone is not written at every probe
PROBE_TOKENS = 2048  # held-out tokens that tell how far training is
CONTEXT_FREE, PREVIOUS_TOKEN = "context-free", "previous-token"


@dataclass(frozen=True)
class Lesson:
    """Rows to train on and rows held out, with values of the recipe's section."""

    rows: RoutingRows
    train_R: np.ndarray
    held_R: np.ndarray
    schedule: Schedule
    batch: int
    dtype: torch.dtype
    backbone_rate: float
    seed: int
    optimizer: OptimizerName = "adamw"

    def tokens(self, chosen_R: np.ndarray) -> int:
        """Tokens of these rows."""
        return int((self.rows.end_R[chosen_R] - self.rows.begin_R[chosen_R]).sum())

    def overlap(self, hits_L: np.ndarray, chosen_R: np.ndarray) -> float:
        """Mean top-K overlap from the hits on these rows."""
        return float(hits_L.sum() / (self.tokens(chosen_R) * self.rows.geometry.top_k * len(hits_L)))

    @property
    def probe_R(self) -> np.ndarray:
        """Held-out rows of `PROBE_TOKENS` tokens from all over the trace, or all."""
        mixed_R = np.random.default_rng(self.seed).permutation(self.held_R)
        ends = np.cumsum(self.rows.end_R[mixed_R] - self.rows.begin_R[mixed_R])
        return mixed_R[: int(np.searchsorted(ends, PROBE_TOKENS)) + 1]

    def probe(self, model: RoutingPredictor) -> float:
        """The predictor's overlap on the probe."""
        chosen_R = self.probe_R
        return self.overlap(evaluate(model, self, chosen_R), chosen_R)


def lesson_of(recipe: Recipe, rows: RoutingRows) -> Lesson:
    """The recipe's section, over these rows."""
    section = recipe.predictor
    train_R, held_R = split_rows(rows, section.held_out, recipe.seed)
    steps = section.epochs * max(1, len(train_R) // section.batch)
    schedule = Schedule(steps, section.lr, max_minutes=section.max_minutes)
    dtype = getattr(torch, section.dtype)
    rate, optimizer = section.backbone_rate, section.optimizer
    return Lesson(rows, train_R, held_R, schedule, section.batch, dtype, rate, recipe.seed, optimizer)


@torch.no_grad()
def evaluate(model: RoutingPredictor, lesson: Lesson, chosen_R: np.ndarray) -> np.ndarray:
    """Hits [L] of the predictor on these rows."""
    model.eval()
    geometry = lesson.rows.geometry
    hits_L = torch.zeros(len(geometry.layers), dtype=torch.int64)
    for begin in range(0, len(chosen_R), lesson.batch):
        part = batch_of(lesson.rows, chosen_R[begin : begin + lesson.batch]).to(model.device)
        predicted_PLk = top_experts(routing_logits(model, part, lesson.dtype), geometry.top_k)
        hits_L += overlap_hits(predicted_PLk, part.experts_PLk).cpu()
    return hits_L.numpy()


@dataclass
class Levels:
    """Saves, for each level, the checkpoint whose overlap on the probe came nearest; a resumed run goes on with them.

    Paper: EcoSpec Table 9.
    """

    folder: Path
    target: str

    def offer(self, model: RoutingPredictor, reached: float, step: int) -> None:
        """The predictor after `step` steps, at this overlap."""
        for name, level in LEVELS.items():
            saved = self.folder / name
            best = abs(read_header(saved)["probe"] - level) if (saved / HEADER).exists() else NEAR + NEARER
            if abs(reached - level) <= best - NEARER:
                with new_folder(saved) as temp:
                    write_predictor(temp, model, self.target, {"probe": reached, "steps": step})

    def saved(self) -> dict[str, Path]:
        """Folders of the levels that were met."""
        return {name: self.folder / name for name in LEVELS if (self.folder / name / HEADER).exists()}


def baseline_hits(rows: RoutingRows, train_R: np.ndarray, held_R: np.ndarray) -> dict[str, np.ndarray]:
    """Hits [L] of each baseline on the held-out rows.

    `context-free`: the experts that a token id was routed to most often in training; ties and new ids by the layer's
    load, then by lower id. `previous-token`: the experts of the token before; of a first one, the layer's most used.
    """
    train_T, held_T = rows.tokens_of(train_R), rows.tokens_of(held_R)
    experts, top_k = rows.geometry.num_experts, rows.geometry.top_k
    ids_U, held_token_T = np.unique(rows.token_T[held_T], return_inverse=True)
    index_T = np.searchsorted(ids_U, rows.token_T[train_T])
    index_T[index_T == len(ids_U)] = 0
    known_T = ids_U[index_T] == rows.token_T[train_T]
    first_T = rows.first_T[held_T]
    hits = {name: np.zeros(len(rows.geometry.layers), dtype=np.int64) for name in (CONTEXT_FREE, PREVIOUS_TOKEN)}
    for layer in range(len(rows.geometry.layers)):
        trained_Tk = rows.experts_TLk[train_T, layer].astype(np.int64)
        routed_Tk = rows.experts_TLk[held_T, layer].astype(np.int64)
        load_E = np.bincount(trained_Tk.ravel(), minlength=experts)
        flat = (index_T[known_T, None] * experts + trained_Tk[known_T]).ravel()
        counts_UE = np.bincount(flat, minlength=len(ids_U) * experts).reshape(len(ids_U), experts)
        ranked_UE = counts_UE + load_E / (load_E.sum() + 1)  # a load is less than one count
        best_Uk = np.argsort(-ranked_UE, axis=1, kind="stable")[:, :top_k]
        hits[CONTEXT_FREE][layer] = _layer_hits(best_Uk[held_token_T], routed_Tk)

        usual_k = np.argsort(-load_E, kind="stable")[:top_k]
        before_Tk = rows.experts_TLk[np.maximum(held_T - 1, 0), layer].astype(np.int64)
        hits[PREVIOUS_TOKEN][layer] = _layer_hits(np.where(first_T[:, None], usual_k, before_Tk), routed_Tk)
    return hits


def _layer_hits(predicted_Tk: np.ndarray, routed_Tk: np.ndarray) -> int:
    return int(overlap_hits(predicted_Tk[:, None], routed_Tk[:, None])[0])
