"""Commands that decode: `generate` and `eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from moexp.cli.app import (
    OutOption,
    RecipeOption,
    SetOption,
    app,
    command,
    load,
    make_console,
)


@command(app, "generate", 'moexp generate "Why is the sky blue?" --recipe pocket')
def generate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the user says.")],
    recipe: RecipeOption = "pocket",
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Decode the same request by AR too, and compare.")
    ] = True,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Draw a draft tree and what was selected from it.")
    ] = False,
    changes: SetOption = None,
) -> None:
    """Answer a request, streamed, showing which tokens were drafted, and what that saved."""
    from moexp.cli.generate import generate as run
    from moexp.cli.stages import begin

    chosen = load(recipe, changes)
    begin(chosen)
    if run(chosen, text, make_console(), compare=compare, show_tree=show_tree).identical is False:
        raise typer.Exit(1)


@command(app, "eval", "moexp eval --recipe pocket --tokens 10000")
def eval_(
    recipe: RecipeOption = "pocket",
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, metavar="N", help="Compare at least N tokens in all.")
    ] = None,
    changes: SetOption = None,
    out: OutOption = None,
) -> None:
    """Check that every method gives exactly what plain decoding gives; exit code 1 if not."""
    from moexp.cli.stages import eval_stage

    if not eval_stage(load(recipe, changes), make_console(), tokens=tokens, out=out):
        raise typer.Exit(1)
