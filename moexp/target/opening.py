"""Opens a recipe's target, draft experts and draft head.

What needs torch is imported in functions: commands that open nothing start fast.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moexp.base.errors import MoexpError
from moexp.config.locations import draft_folder, head_folder, padded_folder, require, target_folder
from moexp.config.recipe import Recipe
from moexp.target.hub_folder import hub_folder

if TYPE_CHECKING:
    from moexp.target.draft_expert import DraftExperts
    from moexp.target.heads.head import DraftHead
    from moexp.target.load import Target


def find_target(recipe: Recipe, *, padded: bool = False) -> Path:
    """The checkpoint folder to open.

    Raises:
        MoexpError: not built yet, or (kind hub) not to be had.
    """
    if recipe.target.kind == "hub":
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

    from moexp.base.devices import pick_device
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


def find_head(recipe: Recipe) -> Path:
    """The folder of the recipe's draft head: the published one that `paths.head` names, or the one trained here.

    Raises:
        MoexpError: not trained yet, or (published) not to be had.
    """
    if recipe.paths.head is not None:
        return hub_folder(recipe.paths.head, key="paths.head")
    folder = head_folder(recipe)
    require(folder.exists(), "the draft head is not trained", folder, f"moexp train-drafter --recipe {recipe.name}")
    return folder


def head_fingerprint(recipe: Recipe) -> str:
    """Which weights the recipe's draft head has: of a checkpoint samples are read, of a head trained here all."""
    from moexp.target.load import checkpoint_fingerprint

    folder = find_head(recipe)
    if (folder / "config.json").is_file():
        return checkpoint_fingerprint(folder)
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def open_draft_head(recipe: Recipe, target: Target) -> DraftHead:
    """The recipe's draft head, in the target's dtype.

    Raises:
        MoexpError: not trained yet, trained for another target, or a published one that does not fit.
    """
    from moexp.target.heads import eagle_files, mtp_files
    from moexp.target.load import drafters_identity, target_identity

    head: Any
    folder, identity = find_head(recipe), drafters_identity(target.folder)
    embedding = target.model.get_input_embeddings()
    if recipe.head.kind != "mtp":
        head = eagle_files.load_eagle_head(folder, target.spec, embedding, fingerprint=identity, dtype=target.dtype)
    elif recipe.paths.head is None or (folder / mtp_files.HEADER).is_file():
        head = mtp_files.load_mtp_head(folder, target.model, identity, dtype=target.dtype)
    else:
        if target_identity(folder) != identity:
            valid = "the target's own checkpoint, or a head trained for it"
            raise MoexpError(f"{recipe.paths.head} is not the target's checkpoint", where="paths.head", valid=valid)
        head = mtp_files.load_mtp_layer(folder, target.model, dtype=target.dtype)
    return head.to(target.device)
