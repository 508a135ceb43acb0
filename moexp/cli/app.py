"""The command line: each command parses its flags and calls one function, and imports what is heavy itself.

To add a command:

    @command(app, "bench", "moexp bench --recipe pocket --table 2")
    def bench(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
        "Measure the tables of a paper."
        from moexp.bench import run

        run(load(recipe, changes), out)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from moexp import __version__
from moexp.cli.group import CommandGroup

if TYPE_CHECKING:
    from rich.console import Console

    from moexp.config.recipe import Recipe

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


app = typer.Typer(
    name="moexp",
    cls=CommandGroup,
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
    from moexp.config.recipe import load_recipe

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
    if not sys.stderr.isatty():  # bars of others obey the same rule as ours; tqdm looks once, when it is imported
        os.environ.setdefault("TQDM_DISABLE", "1")


def with_out(changes: list[str] | None, key: str, out: Path | None) -> list[str] | None:
    """The changes, with `--out` as one more: later commands find the folder by the same `--set`."""
    if out is None:
        return changes
    typer.echo(f"to use it later: --set {key}={out}", err=True)
    return [*(changes or ()), f"{key}={out}"]


def make_console() -> Console:
    from rich.console import Console

    return Console()


PaperOption = Annotated[str, typer.Option("--paper", metavar="NAME", help="Whose tables.")]


def say_files(files: list[Path], *, show: bool) -> None:
    """Names the files that were written; with `show`, prints the Markdown ones."""
    for file in files:
        if show and file.suffix == ".md":
            typer.echo(file.read_text(encoding="utf-8"))
    for file in files:
        typer.echo(str(file))
