"""Commands that build, trace and train."""

from __future__ import annotations

from typing import Annotated

import typer

from moexp.cli.app import OutOption, RecipeOption, SetOption, app, command, load, make_console, with_out


@command(app, "build-target", "moexp build-target --recipe pocket")
def build_target(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Build the target to decode: a dense model carved into experts, and repaired."""
    from moexp.cli.stages import build_stage

    build_stage(load(recipe, with_out(changes, "paths.target", out)), make_console())


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
    from moexp.cli.stages import trace_stage

    trace_stage(load(recipe, changes), make_console(), text=text, out=out)


@command(app, "train-draft-expert", "moexp train-draft-expert --recipe pocket")
def train_draft_expert(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Distil the target's draft experts from it."""
    from moexp.cli.stages import train_stage

    train_stage(load(recipe, with_out(changes, "paths.draft_experts", out)), make_console())


@command(app, "train-predictor", "moexp train-predictor --recipe pocket")
def train_predictor(recipe: RecipeOption = "pocket", changes: SetOption = None, out: OutOption = None) -> None:
    """Train a small model to predict which experts the target will use."""
    from moexp.cli.stages import predictor_stage

    predictor_stage(load(recipe, with_out(changes, "paths.predictor", out)), make_console())


@command(app, "train-drafter", "moexp train-drafter --recipe pocket-eagle3")
def train_drafter(recipe: RecipeOption = "pocket-eagle3", changes: SetOption = None) -> None:
    """Train a head that drafts from the target's hidden states: EAGLE-3, MTP or GTO."""
    from moexp.cli.stages import drafter_stage

    drafter_stage(load(recipe, changes), make_console())


@command(app, "write-corpus", "moexp write-corpus --recipe pocket --author target --tokens 100000")
def write_corpus(
    author: Annotated[str, typer.Option("--author", metavar="dense|target", help="Which model writes.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="Tokens to write.")],
    recipe: RecipeOption = "pocket",
    changes: SetOption = None,
    out: OutOption = None,
) -> None:
    """Let a model write text to train on."""
    from moexp.cli.stages import corpus_stage

    corpus_stage(load(recipe, changes), make_console(), author=author, tokens=tokens, out=out)


QuantOption = Annotated[str, typer.Option("--quant", "-q", metavar="none|q8_0|q4_0", help="How experts are stored.")]


@command(app, "pack", "moexp pack --recipe pocket --quant q4_0")
def pack(
    recipe: RecipeOption = "pocket", quant: QuantOption = "none", changes: SetOption = None, out: OutOption = None
) -> None:
    """Copy the target with one aligned record an expert, quantised if asked; interrupted, it resumes."""
    from moexp.runtime.store.pack_writer import pack_stage

    folder = pack_stage(load(recipe, changes), quant, out)
    typer.echo(f"packed: {folder}")
    typer.echo(f"to use it: --set target.kind=hub --set target.source=hub --set target.path={folder}", err=True)
