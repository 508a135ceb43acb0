"""`moexp race` and `moexp compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moexp.cli import app, command, load, say_files


@command(app, "compare", "moexp compare pocket pocket-qwen3")
def compare(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Recipes whose tables are in results/.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write here, not to results/ecospec-targets.")
    ] = None,
) -> None:
    """Put EcoSpec's Table 1 of several targets into one, with what marginal cost saves on each; nothing is run."""
    from moexp.bench.compare import compare as run

    say_files(run(recipes, out=out), show=True)


@command(app, "race", "moexp race pocket mine.yaml --prompts 2 --tokens 32")
def race(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE...",
            help="Whose methods. Target and workloads are the first one's; a file without a base is laid over it.",
        ),
    ],
    platform: Annotated[
        str | None,
        typer.Option("--platform", "-p", metavar="NAME", help="local-disk, host, resident, paced-cg or paced-mn."),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts a workload.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens a prompt.")] = 32,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the files in results/RECIPE/races.")] = "race",
) -> None:
    """Decode the same prompts by AR and by each recipe's method, in turns over one store, and compare them."""
    from moexp.bench.race import run_race
    from moexp.recipe import load_method

    chosen = [load(recipes[0], None), *(load_method(one, base=recipes[0]) for one in recipes[1:])]
    say_files(run_race(chosen, platform=platform, prompts=prompts, tokens=tokens, name=name), show=True)
