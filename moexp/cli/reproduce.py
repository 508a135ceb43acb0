"""`moexp reproduce`: all stages in order, from the target to both papers' tables, what is simulated from their records,
the audit and the report; each is skipped where it is done.

What needs torch is imported in functions, so that a mistake in a recipe is shown at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from moexp.audit import run_audit
from moexp.cli import simulate, stages
from moexp.cli.simulate import Simulation
from moexp.config import locations
from moexp.config.recipe import Recipe
from moexp.sim.platforms.files import machine_file
from moexp.tables.trained.files import write_draft_summary, write_target_summary
from moexp.target.opening import find_target
from moexp.web.build import write_reports
from moexp.web.sources import find_runs

Stage = tuple[str, Callable[[], object]]
"""A name, and what to run; False ends the reproduction."""


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
    started, run = time.monotonic(), Reproduction(recipe, console)
    todo = run.stages()
    for number, (name, stage) in enumerate(todo, start=1):
        heading = f"{number}/{len(todo)} {name}, {_clock(started)} since the start"
        console.rule(heading, align="left", characters="-")
        if stage() is False:
            return False
    console.rule(align="left", characters="-")
    console.print(f"done in {_clock(started)}", highlight=False)
    stages.print_path(console, "trace", locations.trace_folder(recipe))
    stages.print_path(console, "draft experts", locations.draft_folder(recipe))
    stages.print_path(console, "results", locations.results_folder(recipe))
    for label, files in (("table", run.tables), ("report", run.reports)):
        for file in files:
            if file.suffix in (".md", ".html"):
                stages.print_path(console, label, file)
    return run.consistent


@dataclass
class Reproduction:
    """A recipe's stages, and what they made.

    Attributes:
        tables: files of the papers' tables.
        reports: files that are derived from these.
        consistent: whether the audit found our results so.
    """

    recipe: Recipe
    console: Console
    tables: list[Path] = field(default_factory=list)
    reports: list[Path] = field(default_factory=list)
    consistent: bool = True

    def stages(self) -> list[Stage]:
        """All stages in order."""
        recipe, console = self.recipe, self.console
        todo: list[Stage] = [
            ("build-target", lambda: stages.build_stage(recipe, console)),
            ("trace-routing", lambda: stages.trace_stage(recipe, console)),
            ("train-draft-expert", self._draft_experts),
            ("eval", lambda: stages.eval_stage(recipe, console, skip=True)),
            ("bench", lambda: self._bench(recipe.bench.tables, "draftexpert")),
        ]
        if recipe.ecospec.tables:
            todo += [
                ("train-drafter", self._heads),
                ("train-predictor", lambda: stages.predictor_stage(recipe, console)),
                ("bench --paper ecospec", lambda: self._bench(recipe.ecospec.tables, "ecospec")),
            ]
        # Tables 2 and 3 have the runs whose routing is replayed, and what they are calibrated on.
        if recipe.simulation.platforms and {2, 3} <= set(recipe.bench.tables):
            todo += [("calibrate", self._calibrate), ("simulate", self._simulate)]
        return [*todo, ("audit", self._audit), ("report", self._report)]

    def _draft_experts(self) -> None:
        stages.train_stage(self.recipe, self.console)
        write_summaries(self.recipe)

    def _bench(self, tables: tuple[int, ...], paper: str) -> None:
        from moexp.bench.papers import run_bench

        self.tables += run_bench(self.recipe, tables, paper=paper)

    def _heads(self) -> None:
        for kind in self.recipe.ecospec.heads:
            stages.drafter_stage(locations.with_head(self.recipe, kind), self.console)

    def _calibrate(self) -> None:
        from moexp.sim.calibration.calibrate import calibrate_stage

        if machine_file().exists():
            stages.print_path(self.console, "calibrated already", machine_file())
        else:
            calibrate_stage(self.recipe, self.console)

    def _simulate(self) -> None:
        platforms = [Simulation(platform=platform) for platform in self.recipe.simulation.platforms]
        sweeps = [Simulation(sweep=sweep) for sweep in self.recipe.simulation.sweeps]
        for flags in (Simulation(validate=True), *platforms, *sweeps):
            self.reports += simulate.run_simulate(self.recipe, flags)

    def _audit(self) -> None:
        audited = run_audit(self.recipe.name)
        self.reports += audited.files
        self.consistent = not audited.inconsistent
        counts = f"{len(audited.lines)} lines, of ours inconsistent: {len(audited.inconsistent)}"
        self.console.print(counts, highlight=False)

    def _report(self) -> None:
        self.reports += write_reports(self.recipe, find_runs(self.recipe), locations.RESULTS)


def write_summaries(recipe: Recipe) -> None:
    """Writes what was measured on the target and its draft experts to the recipe's results."""
    from moexp.learn.target.build import read_manifest
    from moexp.target.draft_expert import read_header

    folder, manifest = locations.results_folder(recipe), read_manifest(find_target(recipe))
    if manifest.get("quality"):
        write_target_summary(folder, recipe.name, manifest)
    header = read_header(locations.draft_folder(recipe))
    if header.get("metrics"):
        write_draft_summary(folder, recipe.name, header)


def _clock(started: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    return f"{minutes}:{seconds:02d}"
