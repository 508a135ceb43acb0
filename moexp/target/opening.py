"""Opens a recipe's target, draft experts and draft head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moexp.config.recipe import Recipe

if TYPE_CHECKING:
    from moexp.target.draft_expert import DraftExperts
    from moexp.target.heads.head import DraftHead
    from moexp.target.load import Target
from moexp.config.locations import draft_folder, head_folder, padded_folder, require, target_folder


def find_target(recipe: Recipe, *, padded: bool = False) -> Path:
    """The checkpoint folder to open.

    Raises:
        MoexpError: not built yet, or (kind hub) not to be had.
    """
    if recipe.target.kind == "hub":
        from moexp.target.hub_folder import hub_folder

        assert recipe.target.path is not None
        return hub_folder(recipe.target.path, recipe.target.revision)
    folder = padded_folder(recipe) if padded else target_folder(recipe)
    command = f"moexp build-target --recipe {recipe.name}"
    require((folder / "config.json").exists(), "the target is not built", folder, command)
    return folder


def open_target(recipe: Recipe, *, padded: bool = False, dtype: str | None = None) -> Target:
    """Loads everything but the routed experts of the recipe's target, to its device.

    Raises:
        MoexpError: not built yet, or a device that is not there or that the recipe's store cannot serve.
    """
    import torch

    from moexp.base.compute import pick_device
    from moexp.target.load import load_target

    device = pick_device(recipe.device, recipe.store.kind)
    folder = find_target(recipe, padded=padded)
    return load_target(folder, dtype=getattr(torch, dtype or recipe.target.dtype), device=device)


def open_draft_experts(recipe: Recipe, target: Target) -> DraftExperts:
    """The recipe's draft experts, in the target's dtype.

    Raises:
        MoexpError: not trained yet, or trained for another target.
    """
    from moexp.target.draft_expert import HEADER, load_draft_experts
    from moexp.target.load import drafters_identity

    folder = draft_folder(recipe)
    command = f"moexp train-draft-expert --recipe {recipe.name}"
    require((folder / HEADER).exists(), "the draft experts are not trained", folder, command)
    return load_draft_experts(folder, drafters_identity(target.folder), dtype=target.dtype).to(target.device)


def open_draft_head(recipe: Recipe, target: Target) -> DraftHead:
    """The recipe's draft head, in the target's dtype.

    Raises:
        MoexpError: not trained yet, or trained for another target.
    """
    from moexp.target.heads.eagle_files import load_eagle_head
    from moexp.target.heads.mtp_files import load_mtp_head
    from moexp.target.load import drafters_identity

    folder = head_folder(recipe)
    require(folder.exists(), "the draft head is not trained", folder, f"moexp train-drafter --recipe {recipe.name}")
    identity = drafters_identity(target.folder)
    if recipe.head.kind == "mtp":
        return load_mtp_head(folder, target.model, identity, dtype=target.dtype).to(target.device)
    embedding = target.model.get_input_embeddings()
    return load_eagle_head(folder, target.spec, embedding, fingerprint=identity, dtype=target.dtype).to(target.device)
