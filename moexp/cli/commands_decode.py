"""Commands that decode: answers, the exactness gate, and measurements."""

from __future__ import annotations

from typing import Annotated

import typer

from moexp.cli.app import OutOption, PaperOption, RecipeOption, SetOption, app, command, load, make_console, say_files


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


@command(app, "reproduce", "moexp reproduce --recipe pocket")
def reproduce(recipe: RecipeOption = "pocket", changes: SetOption = None) -> None:
    """Run every stage in order, skipping what is done, and write all tables."""
    from moexp.cli.reproduce import reproduce as run

    if not run(load(recipe, changes), make_console()):
        raise typer.Exit(1)


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
    from moexp.bench.papers import parse_request, run_bench

    numbers, name = parse_request(table, figure, paper)
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
    from moexp.bench.budgets import run_budgets

    say_files(run_budgets(load(recipe, changes), prompts, tokens), show=True)


@command(app, "tune", "moexp tune --recipe pocket")
def tune(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Choose K, tau, B and how much is prefetched, on prompts that no table uses."""
    from moexp.bench.tune import run_tune

    best = run_tune(load(recipe, changes), out=out)
    speedup = "" if best.speedup is None else f", {best.speedup:.2f} times AR"
    typer.echo(f"best: {best.setting.name}{speedup} ({best.table})")
    typer.echo("to use it: " + " ".join(f"--set {override}" for override in best.overrides()))


@command(app, "bench-quant", "moexp bench-quant --recipe pocket")
def bench_quant(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Measure bytes, speed and held-out loss with experts as stored, in Q8_0 and in Q4_0."""
    from moexp.bench.quantised import run_quantised

    say_files(run_quantised(load(recipe, changes), out=out), show=True)


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
    from moexp.config.recipe import load_method

    chosen = [load(recipes[0], None), *(load_method(one, base=recipes[0]) for one in recipes[1:])]
    say_files(run_race(chosen, platform=platform, prompts=prompts, tokens=tokens, name=name), show=True)
