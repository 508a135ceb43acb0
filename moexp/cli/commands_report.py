"""Commands that read files alone: recipes, reports and the audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moexp.cli.app import OutOption, RecipeOption, SetOption, app, command, load, make_console, say_files


@command(app, "recipes", "moexp recipes")
def recipes() -> None:
    """List the shipped recipes."""
    from rich.table import Table

    from moexp.config.recipe import list_recipes

    table = Table("recipe", "what it does", box=None, pad_edge=False)
    for info in list_recipes():
        table.add_row(info.name, info.summary)
    make_console().print(table)


@command(app, "show-recipe", "moexp show-recipe --recipe pocket --set draft.width=768")
def show_recipe(recipe: RecipeOption = "pocket", changes: SetOption = None) -> None:
    """Print a recipe with everything it inherits, defaults included."""
    typer.echo(load(recipe, changes).resolved_yaml(), nl=False)


@command(app, "report", "moexp report --recipe pocket")
def report(
    recipe: RecipeOption = "pocket",
    paper: Annotated[
        str | None, typer.Option("--paper", metavar="NAME", help="Whose tables; by default of all papers with records.")
    ] = None,
    changes: SetOption = None,
    out: OutOption = None,
) -> None:
    """Rebuild tables, figures and the report (Markdown and one HTML page) from raw records; nothing is run."""
    from moexp.web.build import rebuild_report

    say_files(rebuild_report(load(recipe, changes), paper, out=out), show=False)


@command(app, "audit", "moexp audit --recipe pocket")
def audit(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Calculate what the papers' own numbers imply, and check ours the same way; exit code 1 if ours disagree."""
    from moexp.audit import run_audit

    if run_audit(load(recipe, changes).name, make_console(), out=out).inconsistent:
        raise typer.Exit(1)


@command(app, "compare", "moexp compare pocket pocket-qwen3")
def compare(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Recipes whose tables are in results/.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write here, not to results/ecospec-targets.")
    ] = None,
) -> None:
    """Put EcoSpec's Table 1 of several targets into one, with what marginal cost saves on each; nothing is run."""
    from moexp.tables.ecospec.compare import compare as run

    say_files(run(recipes, out=out), show=True)
