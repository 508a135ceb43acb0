"""What trainers of drafters start from: the target with its experts in memory, and rows [N, L] of its corpora."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from moexp.base import ranks
from moexp.base.devices import Device, training_device
from moexp.base.progress import stage
from moexp.config.recipe import Recipe
from moexp.learn.corpus.files import Author, corpus_rows, load_rows, shipped_corpora
from moexp.target.load import target_identity
from moexp.target.pack_format import refuse_packed
from moexp.target.tokenizer import load_tokenizer


@dataclass
class TrainingSetup:
    """A target in memory, rows to train on and rows held out, and a folder for unfinished work."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: str
    train_NL: Tensor
    held_NL: Tensor
    work: Path
    contexts: DynamicCache | None = None
    """The target's keys and values of the held-out rows, once a draft path was measured on them."""

    @property
    def state(self) -> Path:
        """Folder of checkpoints."""
        return self.work / "state"

    def finish(self, measure: Callable[[], dict[str, Any]], save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Measures and saves what was trained, on rank 0, and removes the checkpoints; returns the metrics."""

        def finish() -> dict[str, Any]:
            with stage("Measure on held-out text", None):
                metrics = measure()
            save(metrics)
            shutil.rmtree(self.state, ignore_errors=True)
            return metrics

        return ranks.on_main(finish)


def load_with_experts(folder: Path, dtype: str, device: Device = "cpu") -> tuple[Any, PreTrainedTokenizerBase]:
    """The target in `folder` with all its experts in memory, and its tokenizer; MoexpError for packed experts."""
    refuse_packed(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return model.to(training_device(device)), load_tokenizer(folder)


def open_setup(recipe: Recipe, target: Path, out: Path) -> TrainingSetup:
    """Loads the target and the corpora that the draft section names; unfinished work lies beside `out`."""
    with stage("Load the target", None):
        model, tokenizer = load_with_experts(target, recipe.target.dtype, recipe.device)
    section, work = recipe.draft.corpus, work_folder(out)
    names = ("dense", "target") if section.author == "both" else (section.author,)
    if section.source == "write":
        names = ("target",)
    authors = [Author(name, model, tokenizer) for name in names]
    rows = [corpus_rows(section, author, work / f"corpus-{author.name}", recipe.seed) for author in authors]
    count = recipe.draft.held_out_rows
    held_files = shipped_corpora("held") if section.source == "shipped" else []
    if held_files:  # written by the pocket target at temperature 1, from scripts that no training text has
        held_NL, train_NL = load_rows(held_files[0], tokenizer)[:count], torch.cat(rows)
    else:
        held_NL = rows[-1][:count]  # by the target itself, where it has written a corpus
        train_NL = torch.cat([*rows[:-1], rows[-1][count:]])
    order = torch.randperm(len(train_NL), generator=torch.Generator().manual_seed(recipe.seed))
    train_NL = train_NL[order][: max(1, section.tokens // train_NL.shape[1])]
    return TrainingSetup(model, tokenizer, target_identity(target), train_NL, held_NL, work)


def work_folder(out: Path) -> Path:
    """Where unfinished work lies until `out` is written."""
    return out.with_name(out.name + ".work")
