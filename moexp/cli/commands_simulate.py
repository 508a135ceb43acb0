"""Commands of the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moexp.cli.app import OutOption, RecipeOption, SetOption, app, command, load, make_console, say_files


@command(app, "platforms", "moexp platforms")
def platforms() -> None:
    """List the platforms that can be simulated."""
    from rich.table import Table

    from moexp.sim.platforms.files import list_platforms

    table = Table("platform", "constants", "what it is", box=None, pad_edge=False)
    for info in list_platforms():
        table.add_row(info.name, info.tag, info.summary)
    make_console().print(table)


@command(app, "calibrate", "moexp calibrate --recipe pocket")
def calibrate(
    recipe: RecipeOption = "pocket",
    changes: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write here, not to $MOEXP_HOME/platforms/this-machine.yaml."),
    ] = None,
) -> None:
    """Measure this machine for a target, as a platform to simulate."""
    from moexp.sim.calibration.calibrate import calibrate_stage

    calibrate_stage(load(recipe, changes), make_console(), out)


@command(app, "simulate", "moexp simulate --recipe pocket --platform cg")
def simulate(
    recipe: RecipeOption = "pocket",
    platform: Annotated[
        str | None, typer.Option("--platform", "-p", metavar="NAME|PATH", help="The platform to simulate.")
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option("--recording", metavar="PATH", help="Recorded routing; by default the recipe's resident run."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="A plain routing trace, in place of a recording.")
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option("--accept", metavar="P,P..", help="Of a trace, the assumed acceptance by place; else all stand."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="NAME|FILE", help="Simulate and plot the grids of a YAML file.")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Replay the recipe's recorded runs and compare with what was measured.")
    ] = False,
    changes: SetOption = None,
    out: OutOption = None,
) -> None:
    """Predict speeds by a simulation from recorded routing, without a model."""
    from moexp.cli.simulate import Simulation, run_simulate

    run = Simulation(platform, recording, trace, accept, sweep, validate, out)
    say_files(run_simulate(load(recipe, changes), run), show=True)


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
