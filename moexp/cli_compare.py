"""`moexp compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moexp.cli import app, command, say_files


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
