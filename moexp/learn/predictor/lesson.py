"""What a predictor learns from and how, how far it is, and the checkpoints that are saved on the way.

Shapes: R rows, L MoE layers.
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


@dataclass(frozen=True)
class Lesson:
    """Rows to train on and rows held out, with plain values of the recipe's section."""

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
        """Mean top-K overlap over tokens and layers, from the hits on these rows."""
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
    """Hits [L] of the predictor on these rows; over `tokens * k` they are the overlap (EcoSpec, appendix B.1)."""
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
    """Saves, for each level, the checkpoint whose overlap on the probe came nearest (to within `NEARER`).

    On disk from the first: a run that resumes goes on with what it had, and the same steps give the same checkpoints.

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
