"""The command line: each command parses its flags and calls one function, and imports what is heavy itself.

To add a command:

    @command(app, "bench", "moexp bench --recipe pocket --table 2")
    def bench(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
        "Measure the tables of a paper."
        from moexp.bench import run

        run(load(recipe, changes), out)
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from moexp import __version__
from moexp.errors import MoexpError

if TYPE_CHECKING:
    from moexp.recipe import Recipe

USER_ERROR = 2
INTERRUPTED = 130  # what a shell reports for SIGINT

RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", metavar="NAME|PATH", help="A shipped recipe's name, or a YAML file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="A.B=C", help="Override one value of the recipe; may be repeated."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Folder to write to, in place of one under $MOEXP_HOME."),
]

Function = TypeVar("Function", bound=Callable[..., Any])


class _Group(TyperGroup):
    """Ends every command's mistakes and interruptions in one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MoexpError as error:
            line = " ".join(str(error).split())
            typer.echo(f"moexp: error: {line}", err=True)
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt as error:
            again = shlex.join(["moexp", *sys.argv[1:]])
            typer.echo(f"\ninterrupted; finished work is kept. To resume, run again: {again}", err=True)
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    name="moexp",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Speculative decoding for mixture-of-experts models whose experts live in slow memory.",
)


def command(to: typer.Typer, name: str, example: str) -> Callable[[Function], Function]:
    """Registers a command whose help ends with an example that can be pasted."""
    return to.command(name, epilog=f"Example: {example}")


def load(recipe: str, changes: list[str] | None) -> Recipe:
    """The recipe that `--recipe` and `--set` name."""
    from moexp.recipe import load_recipe

    return load_recipe(recipe, changes or ())


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moexp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@command(app, "recipes", "moexp recipes")
def recipes() -> None:
    """List the shipped recipes."""
    from rich.console import Console
    from rich.table import Table

    from moexp.recipe import list_recipes

    table = Table("recipe", "what it does", box=None, pad_edge=False)
    for info in list_recipes():
        table.add_row(info.name, info.summary)
    Console().print(table)


@command(app, "show-recipe", "moexp show-recipe --recipe pocket --set draft.width=768")
def show_recipe(recipe: RecipeOption = "pocket", changes: SetOption = None) -> None:
    """Print a recipe with everything it inherits, defaults included."""
    typer.echo(load(recipe, changes).resolved_yaml(), nl=False)


def main() -> None:
    """The console script."""
    app()
