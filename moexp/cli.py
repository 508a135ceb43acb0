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

from moexp import __version__, ranks
from moexp.cli_group import CommandGroup

if TYPE_CHECKING:
    from rich.console import Console

    from moexp.recipe import Recipe

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
    if not sys.stderr.isatty():  # bars of others obey the same rule as ours; tqdm looks once, when it is imported
        os.environ.setdefault("TQDM_DISABLE", "1")


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


@command(app, "build-target", "moexp build-target --recipe pocket")
def build_target(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Build the target to decode: a dense model carved into experts, and repaired."""
    from moexp.stages import build_stage

    build_stage(load(recipe, _placed(changes, "paths.target", out)), _console())


@command(app, "trace-routing", "moexp trace-routing --recipe pocket --text machine")
def trace_routing(
    recipe: RecipeOption = "pocket",
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="SOURCE", help="machine, a file, or hf:repo; by default the recipe's corpus."),
    ] = None,
    changes: SetOption = None,
    out: OutOption = None,
) -> None:
    """Record which experts the target chooses for every token, as Parquet shards."""
    from moexp.stages import trace_stage

    trace_stage(load(recipe, changes), _console(), text=text, out=out)


@command(app, "train-draft-expert", "moexp train-draft-expert --recipe pocket")
def train_draft_expert(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Distil the target's draft experts from it."""
    from moexp.stages import train_stage

    train_stage(load(recipe, _placed(changes, "paths.draft_experts", out)), _console())


@command(app, "train-predictor", "moexp train-predictor --recipe pocket")
def train_predictor(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Train a small model to predict which experts the target will use."""
    from moexp.stages import predictor_stage

    predictor_stage(load(recipe, _placed(changes, "paths.predictor", out)), _console())


@command(app, "train-drafter", "moexp train-drafter --recipe pocket-eagle3")
def train_drafter(recipe: RecipeOption = "pocket-eagle3", changes: SetOption = None) -> None:
    """Train a head that drafts from the target's hidden states: EAGLE-3, MTP or GTO."""
    from moexp.stages import drafter_stage

    drafter_stage(load(recipe, changes), _console())


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
    from moexp.generate import generate as run
    from moexp.stages import begin

    chosen = load(recipe, changes)
    begin(chosen)
    if run(chosen, text, _console(), compare=compare, show_tree=show_tree).identical is False:
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
    from moexp.stages import eval_stage

    if not eval_stage(load(recipe, changes), _console(), tokens=tokens, out=out):
        raise typer.Exit(1)


@command(app, "write-corpus", "moexp write-corpus --recipe pocket --author target --tokens 100000")
def write_corpus(
    author: Annotated[str, typer.Option("--author", metavar="dense|target", help="Which model writes.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="Tokens to write.")],
    recipe: RecipeOption = "pocket",
    changes: SetOption = None,
    out: OutOption = None,
) -> None:
    """Let a model write text to train on."""
    from moexp.stages import corpus_stage

    corpus_stage(load(recipe, changes), _console(), author=author, tokens=tokens, out=out)


@command(app, "reproduce", "moexp reproduce --recipe pocket")
def reproduce(recipe: RecipeOption = "pocket", changes: SetOption = None) -> None:
    """Run every stage in order, skipping what is done, and write all tables."""
    from moexp.pipeline import reproduce as run

    if not run(load(recipe, changes), _console()):
        raise typer.Exit(1)


def _placed(changes: list[str] | None, key: str, out: Path | None) -> list[str] | None:
    """The changes, with `--out` as one more: later commands find the folder by the same `--set`."""
    if out is None:
        return changes
    typer.echo(f"to use it later: --set {key}={out}", err=True)
    return [*(changes or ()), f"{key}={out}"]


def _console() -> Console:
    from rich.console import Console

    return Console()


PaperOption = Annotated[str, typer.Option("--paper", metavar="NAME", help="Whose tables.")]


@command(app, "bench", "moexp bench --recipe pocket --table 2")
def bench(
    recipe: RecipeOption = "pocket",
    table: Annotated[str | None, typer.Option("--table", "-t", metavar="N|all", help="A table, or all.")] = None,
    figure: Annotated[str | None, typer.Option("--figure", metavar="N", help="A figure, and no table.")] = None,
    paper: PaperOption = "draftexpert",
    changes: SetOption = None,
    out: OutOption = None,
) -> None:
    """Measure the tables of a paper, or one of its figures; what is measured already is kept."""
    from moexp.bench.tables import parse_asked, run_bench

    numbers, name = parse_asked(table, figure, paper)
    files = run_bench(load(recipe, changes), numbers, figure=name, paper=paper, out=out)
    say_files(files, show=numbers is not None and len(numbers) == 1)


@command(app, "cache-budgets", "moexp cache-budgets --recipe pocket --prompts 1")
def cache_budgets(
    recipe: RecipeOption = "pocket",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts to decode.")] = 2,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="New tokens a prompt.")] = 16,
    changes: SetOption = None,
) -> None:
    """Measure every cache policy at budgets from none to all experts, and simulate the same."""
    from moexp.bench.budgets_table import run_budgets

    say_files(run_budgets(load(recipe, changes), prompts, tokens), show=True)


@command(app, "tune", "moexp tune --recipe pocket")
def tune(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Choose K, tau, B and how much is prefetched, on prompts that no table uses."""
    from moexp.bench.tune import run_tune

    found = run_tune(load(recipe, changes), out=out)
    speedup = "" if found.speedup is None else f", {found.speedup:.2f} times AR"
    typer.echo(f"best: {found.setting.name}{speedup} ({found.table})")
    typer.echo("to use it: " + " ".join(f"--set {override}" for override in found.overrides()))


@command(app, "platforms", "moexp platforms")
def platforms() -> None:
    """List the platforms that can be simulated."""
    from rich.table import Table

    from moexp.sim.platform import list_platforms

    table = Table("platform", "constants", "what it is", box=None, pad_edge=False)
    for info in list_platforms():
        table.add_row(info.name, info.tag, info.summary)
    _console().print(table)


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
    from moexp.sim.calibrate import calibrate_stage

    calibrate_stage(load(recipe, changes), _console(), out)


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
    from moexp.sim.command import run_simulate

    chosen = load(recipe, changes)
    files = run_simulate(
        chosen,
        platform=platform,
        recording=recording,
        trace=trace,
        accept=accept,
        sweep=sweep,
        validate=validate,
        out=out,
    )
    say_files(files, show=True)


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

    if run_audit(load(recipe, changes).name, _console(), out=out).inconsistent:
        raise typer.Exit(1)


def say_files(files: list[Path], *, show: bool) -> None:
    """Names the files that were written; with `show`, prints the Markdown ones."""
    for file in files:
        if show and file.suffix == ".md":
            typer.echo(file.read_text(encoding="utf-8"))
    for file in files:
        typer.echo(str(file))


from moexp import cli_compare, cli_pack, cli_plan  # noqa: E402, F401 (they register their commands)


def main() -> None:
    """The console script."""
    try:
        app()
    except SystemExit as end:
        ranks.leave(end.code)
        raise
