"""`moexp plan`: what a recipe's target needs and what may be expected of it, from its shape alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moexp.config.recipe import Recipe


def run_plan(recipe: Recipe, platform: str | None = None) -> str:
    """Sizes, memory, disk, expected speed and time of a recipe's target, as text of 80 columns.

    Nothing is fetched, and no weight is read. Speeds are estimated by formulas that stand beside them, or are a
    paper's.

    Args:
        platform: to expect speeds on, by name or file; None: those that list the model, and this machine where it is
            calibrated.

    Raises:
        MoexpError: a target whose shape is not known, or no such platform.
    """
    from moexp.plan.memory import sizes_of
    from moexp.plan.shape import shape_of
    from moexp.plan.speed import speeds_of
    from moexp.plan.text import plan_text

    shape = shape_of(recipe)
    moved = sizes_of(shape, recipe).moved
    return plan_text(recipe, shape, speeds_of(shape.geometry, recipe.name, moved, platform))
