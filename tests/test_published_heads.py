"""Heads that were trained elsewhere: every command decodes with them as they are published, and refuses others."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from moexp.base.errors import MoexpError
from moexp.bench.ecospec import trained_heads
from moexp.bench.gate import gate_identity, run_gate
from moexp.bench.race import digest_of, run_race
from moexp.cli.generate import generate
from moexp.cli.stages import drafter_stage
from moexp.config.locations import run_folder
from moexp.config.recipe import Recipe, load_recipe
from moexp.target.heads.eagle_files import HEADER, save_eagle_head
from moexp.target.load import load_target
from moexp.target.opening import open_draft_head
from tests.family_files import edit_config, read_tensors, to_fp8, write_shards
from tests.heads import deepseek_with_mtp, small_eagle
from tests.tiny_models import tiny_folder

pytestmark = pytest.mark.e2e

CHANGES = (
    "target={kind: hub, source: hub, dtype: float32}",
    "decode={drafter: head, prefetch: false, tree: {selector: confidence, predictor: none}}",
    "store.kind=host",
    "eval={dtypes: [float32], prompts: 1, max_new_tokens: 6}",
    "bench={workloads: [math], max_new_tokens: 6, warmup_prompts: 0, bootstrap_samples: 50}",
)


def recipe_of(target: Path, head: Path | str, kind: str, *changes: str) -> Recipe:
    return load_recipe("tiny", [*CHANGES, f"target.path={target}", f"head.kind={kind}", f"paths.head={head}", *changes])


def published_eagle(target: Path, folder: Path) -> Path:
    """A random head for the target, as others publish theirs: without a header that names the target."""
    model = load_target(target, dtype=torch.float32).model
    save_eagle_head(folder, small_eagle(model, list(range(0, 200, 2))), "")
    (folder / HEADER).unlink()
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_with_mtp(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def eagle(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_eagle(glm, tmp_path_factory.mktemp("eagle") / "head")


def decoded(recipe: Recipe) -> Any:
    return generate(recipe, "What is 2 + 2?", Console(file=io.StringIO(), width=80))


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "gto"])
def test_every_command_decodes_with_a_published_head(kind, deepseek, glm, eagle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(deepseek, deepseek, kind) if kind == "mtp" else recipe_of(glm, eagle, kind)
    result = decoded(recipe)
    assert result.identical is True and sum(step.drafted for step in result.arm.steps) > 0

    gate = run_gate(recipe)
    assert gate.passed and any(outcome.method.startswith("head") for outcome in gate.outcomes)
    assert len(gate_identity(recipe)) == 16

    run_race([recipe], platform="resident")
    assert len(digest_of([recipe])) == 12
    assert trained_heads(recipe) == [kind]  # what `moexp bench --paper ecospec` decodes with
    plain = recipe.model_copy(update={"paths": recipe.paths.model_copy(update={"head": None})})
    assert run_folder(recipe, paper="ecospec") != run_folder(plain, paper="ecospec")


def test_the_mtp_layer_of_a_checkpoint_in_fp8_drafts_for_it(tmp_path: Path):
    folder = deepseek_with_mtp(tmp_path / "fp8")
    stored, _ = to_fp8(read_tensors(folder))
    write_shards(folder, stored)
    block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_config(folder, quantization_config=block)
    result = decoded(recipe_of(folder, folder, "mtp"))
    assert result.identical is True and sum(step.drafted for step in result.arm.steps) > 0


def test_there_is_nothing_to_train(deepseek: Path):
    sink = io.StringIO()
    folder = drafter_stage(recipe_of(deepseek, deepseek, "mtp"), Console(file=sink, width=80))
    assert folder == deepseek and "published draft head" in sink.getvalue()


def test_a_head_that_does_not_fit_is_one_clear_error(deepseek: Path, eagle: Path, tmp_path: Path):
    target = load_target(deepseek, dtype=torch.float32)
    other = deepseek_with_mtp(tmp_path / "other", seed=1, expert_gain=0.5)
    with pytest.raises(MoexpError, match=r"other is not the target's checkpoint \(paths.head\)"):
        open_draft_head(recipe_of(deepseek, other, "mtp"), target)
    with pytest.raises(MoexpError, match=r"not the target's checkpoint"):
        open_draft_head(recipe_of(deepseek, eagle, "mtp"), target)
    with pytest.raises(MoexpError, match="no EAGLE head"):
        open_draft_head(recipe_of(deepseek, deepseek, "eagle3"), target)
    wide = tiny_folder(tmp_path / "wide", hidden=64)
    with pytest.raises(MoexpError, match="a head for a target of width 64, but this one's is 32"):
        open_draft_head(recipe_of(deepseek, published_eagle(wide, tmp_path / "head"), "eagle3"), target)
    with pytest.raises(MoexpError, match=r"no folder /nowhere \(paths.head\)"):
        open_draft_head(recipe_of(deepseek, "/nowhere", "eagle3"), target)
    without = tiny_folder(tmp_path / "without")
    with pytest.raises(MoexpError, match="promises 1 MTP layers, but there is no tensor model.layers.3"):
        open_draft_head(recipe_of(without, without, "mtp"), load_target(without))
