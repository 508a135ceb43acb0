"""Commands about packed and quantised experts."""

from __future__ import annotations

from typing import Annotated

import typer

from moexp.cli import OutOption, RecipeOption, SetOption, app, command, load, say_files

QuantOption = Annotated[str, typer.Option("--quant", "-q", metavar="none|q8_0|q4_0", help="How experts are stored.")]


@command(app, "pack", "moexp pack --recipe pocket --quant q4_0")
def pack(
    recipe: RecipeOption = "pocket", quant: QuantOption = "none", changes: SetOption = None, out: OutOption = None
) -> None:
    """Copy the target with one aligned record an expert, quantised if asked; interrupted, it resumes."""
    from moexp.packing import pack_stage

    folder = pack_stage(load(recipe, changes), quant, out)
    typer.echo(f"packed: {folder}")
    typer.echo(f"to use it: --set target.kind=hub --set target.source=hub --set target.path={folder}", err=True)


@command(app, "bench-quant", "moexp bench-quant --recipe pocket")
def bench_quant(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Measure bytes, speed and held-out loss with experts as stored, in Q8_0 and in Q4_0."""
    from moexp.bench.quantised import run_quantised

    say_files(run_quantised(load(recipe, changes), out=out), show=True)
