"""How much a target needs, and where: sizes, disk, host and accelerator memory. Pure arithmetic on its geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moexp.config.recipe import Recipe
from moexp.plan.shape import Shape

Place = Literal["disk", "host", "GPU"]

DRAFT_EXPERT = "draft-expert"
KV_TOKENS = 1_000
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TRAINED_BYTES = 4 + 4 + 8
"""A weight in training: itself, its gradient, and AdamW's two moments, in fp32 (Muon keeps one)."""


@dataclass(frozen=True)
class Part:
    """Some bytes, where they are, and how they were calculated."""

    what: str
    size: int
    place: Place
    how: str


@dataclass(frozen=True)
class Sizes:
    """Bytes of a target's parts.

    Attributes:
        routed: all routed experts, as the checkpoint stores them.
        stored: one of them.
        held: one in the type that is computed in: host memory and slots hold experts decoded.
        moved: one as the recipe's store brings it in.
        slot: room that one takes where it is computed; from disk, one that has to be decoded is read beside
            its decoded self.
        loaded: everything else, in the type that is computed in.
        draft: all draft experts, in that type.
        kv: keys and values of `KV_TOKENS` tokens.
    """

    routed: int
    stored: int
    held: int
    moved: int
    slot: int
    loaded: int
    draft: int
    kv: int


def draft_params(shape: Shape, recipe: Recipe) -> int:
    """Weights of the recipe's draft experts, one a MoE layer."""
    return shape.geometry.moe_layers * 3 * shape.geometry.hidden * recipe.draft.width


def sizes_of(shape: Shape, recipe: Recipe) -> Sizes:
    """Bytes of the parts of a recipe's target."""
    geometry, each = shape.geometry, DTYPE_BYTES[recipe.target.dtype]
    stored, held = geometry.expert_bytes(), (geometry.expert_params + geometry.expert_bias_params) * each
    disk = recipe.store.kind == "disk"
    coded = stored != held or geometry.expert_bias_params > 0
    return Sizes(
        routed=geometry.pool_bytes(),
        stored=stored,
        held=held,
        moved=stored if disk else held,
        slot=held + stored if disk and coded else held,
        loaded=geometry.loaded_params * each,
        draft=draft_params(shape, recipe) * each,
        kv=geometry.kv_bytes(KV_TOKENS, each),
    )


def kept_experts(shape: Shape, recipe: Recipe) -> int:
    """Routed experts that stay from one cycle to the next."""
    store, everything = recipe.store, shape.geometry.layer_experts
    if store.kind == "resident":
        return everything
    if store.policy == "none":
        return 0
    if store.budget_mib is None:
        return everything
    return min(everything, int(store.budget_mib * 2**20) // sizes_of(shape, recipe).held)


def block_rows(recipe: Recipe) -> int:
    """Tokens that a cycle verifies at most, the pending one included."""
    decode = recipe.decode
    if decode.drafter == "ar":
        return 1
    return decode.tree.gamma if decode.tree is not None else decode.max_draft + 1


def compute_place(recipe: Recipe) -> Place:
    """Where the target is computed, if there is a GPU: experts on disk are served in host memory."""
    return "host" if recipe.device == "cpu" or recipe.store.kind == "disk" else "GPU"


def decoding_parts(shape: Shape, recipe: Recipe) -> list[Part]:
    """What decoding keeps in memory."""
    geometry, sizes, here = shape.geometry, sizes_of(shape, recipe), compute_place(recipe)
    each = DTYPE_BYTES[recipe.target.dtype]
    parts = [Part("all but routed experts", sizes.loaded, here, f"{count(geometry.loaded_params)} weights x {each}")]
    if recipe.decode.drafter == DRAFT_EXPERT:
        how = f"{geometry.moe_layers} x 3 x {geometry.hidden} x {recipe.draft.width} x {each}"
        parts.append(Part("draft experts", sizes.draft, here, how))
    if here == "host" and packed_bytes(shape, recipe):
        parts.append(Part("packed copies", packed_bytes(shape, recipe), here, "at most: where a CPU multiplies bf16"))
    if sizes.kv:
        how = f"{geometry.layers} x {geometry.attention.kv_width} x {each} each"
        parts.append(Part(f"KV of {KV_TOKENS:,} tokens", sizes.kv, here, how))
    pool = f"{geometry.layer_experts:,} x {sizes.held / 1e6:.2f} MB"
    if sizes.held != sizes.stored:
        pool += f", as {recipe.target.dtype}"
    if recipe.store.kind == "resident":
        return [*parts, Part("routed experts", geometry.layer_experts * sizes.held, here, pool)]
    if recipe.store.kind == "host":
        parts.append(Part("routed experts", geometry.layer_experts * sizes.held, "host", pool))
    size, how = _slots(shape, recipe)
    return [*parts, Part("slots for routed experts", size, here, how)]


def packed_bytes(shape: Shape, recipe: Recipe) -> int:
    """What the engine adds at most on a CPU that multiplies bf16: resident weights in the layout of its kernels."""
    if recipe.target.dtype != "bfloat16":
        return 0
    sizes = sizes_of(shape, recipe)
    drafts = sizes.draft if recipe.decode.drafter == DRAFT_EXPERT else 0
    return shape.geometry.resident_params * DTYPE_BYTES[recipe.target.dtype] + drafts


def disk_parts(shape: Shape, recipe: Recipe) -> list[Part]:
    """What has to be on disk."""
    parts = [Part("checkpoint", shape.checkpoint_bytes, "disk", _stored(shape))]
    if recipe.decode.drafter == DRAFT_EXPERT:
        parts.append(Part("draft experts", 4 * draft_params(shape, recipe), "disk", "kept in fp32"))
    return parts


def training_bytes(shape: Shape, recipe: Recipe) -> tuple[int, str]:
    """Memory that training takes at least: unlike decoding, it holds the whole target."""
    whole = shape.geometry.routed_params + shape.geometry.loaded_params
    each = DTYPE_BYTES[recipe.target.dtype]
    size, how = whole * each, f"{count(whole)} x {each}"
    if recipe.decode.drafter == DRAFT_EXPERT:
        drafts = draft_params(shape, recipe)
        size, how = size + drafts * TRAINED_BYTES, f"{how} + {count(drafts)} x {TRAINED_BYTES}"
    return size, how


def _stored(shape: Shape) -> str:
    geometry = shape.geometry
    formats = dict.fromkeys((geometry.precision, geometry.resident_precision))
    return f"{count(geometry.checkpoint_params)} weights, {', '.join(formats)}"


def _slots(shape: Shape, recipe: Recipe) -> tuple[int, str]:
    """Room for routed experts where they are computed."""
    geometry, store, rows = shape.geometry, recipe.store, block_rows(recipe)
    sizes = sizes_of(shape, recipe)
    if store.budget_mib is not None:
        slots = min(geometry.layer_experts, int(store.budget_mib * 2**20) // sizes.held)
        how = f"{slots:,} in budget_mib {store.budget_mib:,g}, {slots / geometry.layer_experts:.0%}"
    elif store.policy != "none":
        slots, how = geometry.layer_experts, f"{store.policy} without budget_mib: no limit"
    else:
        most = min(geometry.experts, rows * geometry.top_k)
        slots, how = geometry.moe_layers * most, f"{geometry.moe_layers} x {most}, most of a block of {rows}"
        if geometry.experts > slots:
            slots, how = geometry.experts, "a layer of a prompt"
    return slots * sizes.slot, how


def count(weights: int) -> str:
    """A number of weights in words."""
    return f"{weights / 1e9:.2f} billion" if weights >= 1e9 else f"{weights / 1e6:.3g} million"
