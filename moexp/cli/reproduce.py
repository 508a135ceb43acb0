"""`moexp reproduce`: all stages in order, from the target to both papers' tables, what is simulated from their records,
the audit and the report; each is skipped where it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from moexp.cli import stages
from moexp.config import locations
from moexp.config.recipe import Recipe
from moexp.target.opening import find_target

Stage = tuple[str, Callable[[], bool | None]]
"""A name, and what to run; False ends the whole run."""


def reproduce(recipe: Recipe, console: Console) -> bool:
    """Runs every stage of the recipe; False if the exactness gate failed (then no table is made), or the audit found
    our results at odds with each other.

    EcoSpec's heads, predictor and tables are left out where `ecospec.tables` is empty.

    Raises:
        MoexpError: a table that is not measured here, before anything is run; whatever a stage raises.
    """
    from moexp.bench.papers import check_tables

    check_tables(recipe.bench.tables, "draftexpert", where="bench.tables")
    check_tables(recipe.ecospec.tables, "ecospec", where="ecospec.tables")
    started, files, reports, verdicts = time.monotonic(), list[Path](), list[Path](), list[bool]()
    todo = _stages(recipe, console, files, reports, verdicts)
    for number, (name, run) in enumerate(todo, start=1):
        heading = f"{number}/{len(todo)} {name}, {_clock(started)} since the start"
        console.rule(heading, align="left", characters="-")
        if run() is False:
            return False
    console.rule(align="left", characters="-")
    console.print(f"done in {_clock(started)}", highlight=False)
    places = [
        ("trace", locations.trace_folder(recipe)),
        ("draft experts", locations.draft_folder(recipe)),
        ("results", locations.results_folder(recipe)),
    ]
    made = [("table" if file in files else "report", file) for file in [*files, *reports]]
    for name, place in [*places, *(one for one in made if one[1].suffix in (".md", ".html"))]:
        console.print(f"{name}: {place}", soft_wrap=True, highlight=False)
    return all(verdicts)


def _stages(
    recipe: Recipe, console: Console, files: list[Path], reports: list[Path], verdicts: list[bool]
) -> list[Stage]:
    """The recipe's stages in order; `files` receives the tables, `reports` what is made of them, `verdicts` whether the
    audit found our results consistent.
    """
    from moexp.bench.papers import run_bench
    from moexp.web.build import write_reports
    from moexp.web.sources import find_runs

    def draft_experts() -> None:
        stages.train_stage(recipe, console)
        keep_summaries(recipe)

    def draftexpert_tables() -> None:
        files.extend(run_bench(recipe, recipe.bench.tables))

    def ecospec_tables() -> None:
        files.extend(run_bench(recipe, recipe.ecospec.tables, paper="ecospec"))

    def report() -> None:
        reports.extend(write_reports(recipe, find_runs(recipe), locations.RESULTS))

    def simulate() -> None:
        from moexp.cli.simulate import Simulation, run_simulate

        platforms = [Simulation(platform=platform) for platform in recipe.simulation.platforms]
        sweeps = [Simulation(sweep=sweep) for sweep in recipe.simulation.sweeps]
        for flags in (Simulation(validate=True), *platforms, *sweeps):
            reports.extend(run_simulate(recipe, flags))

    def audit() -> None:
        from moexp.audit import run_audit

        audited = run_audit(recipe.name)
        reports.extend(audited.files)
        verdicts.append(not audited.inconsistent)
        console.print(f"{len(audited.lines)} lines, of ours inconsistent: {len(audited.inconsistent)}", highlight=False)

    def heads() -> None:
        for kind in recipe.ecospec.heads:
            stages.drafter_stage(locations.with_head(recipe, kind), console)

    def done(stage: Callable[[Recipe, Console], Path]) -> Callable[[], None]:
        def run() -> None:
            stage(recipe, console)

        return run

    todo: list[Stage] = [
        ("build-target", done(stages.build_stage)),
        ("trace-routing", done(stages.trace_stage)),
        ("train-draft-expert", draft_experts),
        ("eval", lambda: stages.eval_stage(recipe, console, skip=True)),
        ("bench", draftexpert_tables),
    ]
    if recipe.ecospec.tables:
        todo += [
            ("train-drafter", heads),
            ("train-predictor", done(stages.predictor_stage)),
            ("bench --paper ecospec", ecospec_tables),
        ]
    # Tables 2 and 3 have the runs whose routing is replayed, and what they are calibrated on.
    if recipe.simulation.platforms and {2, 3} <= set(recipe.bench.tables):
        todo += [("calibrate", lambda: calibrate_once(recipe, console)), ("simulate", simulate)]
    return [*todo, ("audit", audit), ("report", report)]


def calibrate_once(recipe: Recipe, console: Console) -> None:
    """Calibrates this machine, unless that is done."""
    from moexp.sim.calibrate import calibrate_stage
    from moexp.sim.platform import machine_file

    if machine_file().exists():
        console.print(f"calibrated already: {machine_file()}", soft_wrap=True, highlight=False)
    else:
        calibrate_stage(recipe, console)


def _clock(started: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    return f"{minutes}:{seconds:02d}"


def keep_summaries(recipe: Recipe) -> list[Path]:
    """Writes what was measured on the target and its draft experts to the recipe's results; returns the files."""
    from moexp.learn.target.build import read_manifest
    from moexp.tables.trained.files import write_draft_summary, write_target_summary
    from moexp.target.draft_expert import read_header

    folder, files = locations.results_folder(recipe), list[Path]()
    manifest = read_manifest(find_target(recipe))
    if manifest.get("quality"):
        files += write_target_summary(folder, recipe.name, manifest)
    header = read_header(locations.draft_folder(recipe))
    if header.get("metrics"):
        files += write_draft_summary(folder, recipe.name, header)
    return files
