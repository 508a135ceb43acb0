"""`moexp plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from moexp.cli import RecipeOption, SetOption, app, command, load


@command(app, "plan", "moexp plan --recipe ds-v2-lite --platform cg")
def plan(
    recipe: RecipeOption = "ds-v2-lite",
    platform: Annotated[
        str | None,
        typer.Option("--platform", "-p", metavar="NAME|PATH", help="Where; by default wherever the model is known."),
    ] = None,
    changes: SetOption = None,
) -> None:
    """Tell what a target needs (disk, memory) and what speed to expect, without fetching or loading it."""
    from moexp.plan import run_plan

    typer.echo(run_plan(load(recipe, changes), platform), nl=False)
