"""What `moexp simulate` does with its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.config.locations import RESULTS, results_folder, run_folder
from moexp.config.recipe import Recipe
from moexp.sim.platforms.simulated import load_simulated
from moexp.sim.routing.sources import Source, open_source
from moexp.sim.studies.study import study, write_study
from moexp.sim.studies.sweep import run_sweep
from moexp.sim.studies.sweep_file import find_sweep, load_sweep
from moexp.sim.validation.validate import RESIDENT, validate
from moexp.tables.core.provenance import run_source
from moexp.tables.sweep_figures import draw_sweep


@dataclass(frozen=True)
class Simulation:
    """The flags of `moexp simulate`.

    Attributes:
        platform: by name or file.
        recording: by default the resident run's of `moexp bench`.
        trace: a plain routing trace, in its place.
        accept: of a trace, the assumed acceptance by position ("0.8,0.6"); None: all are accepted.
        sweep: grids by file or shipped name, in place of all of the above; the recording counts if the file names none.
        validate: replay the recorded runs instead.
        out: the run folder, if it is not the recipe's own.
    """

    platform: str | None = None
    recording: Path | None = None
    trace: Path | None = None
    accept: str | None = None
    sweep: str | None = None
    validate: bool = False
    out: Path | None = None


def run_simulate(recipe: Recipe, flags: Simulation) -> list[Path]:
    """Simulates, and writes to `results/<recipe>/simulation`; returns the files.

    Args:
        recipe: its decode section is simulated; its run folder holds the recordings.

    Raises:
        MoexpError: flags that do not go together, or something that they name is missing.
    """
    folder = results_folder(recipe) / "simulation"
    own = run_folder(recipe, flags.out) / RESIDENT
    if flags.validate:
        return validate(own.parent, RESULTS, recipe.name)
    if flags.sweep is not None:
        file = find_sweep(flags.sweep)
        grids = load_sweep(file).with_default(flags.recording or own)
        table = run_sweep(grids, folder / f"{file.stem}.parquet")
        return [table, *draw_sweep(table, [run_source(own.parent)] if grids.recording == str(own) else ())]
    if flags.platform is None:
        raise MoexpError("no platform", where="--platform", valid="a name of `moexp platforms`, or a file")
    if flags.recording is not None and flags.trace is not None:
        raise MoexpError("a recording and a trace", where="--trace", valid="one of them")
    if flags.accept is not None and flags.trace is None:
        raise MoexpError("acceptance is assumed for traces only", where="--accept", valid="--trace")
    path = flags.trace or flags.recording or own
    routing = open_source(Source(path, acceptance=_chances(flags.accept), max_draft=recipe.decode.max_draft))
    simulated = load_simulated(flags.platform, routing.geometry, routing.expert_bytes)
    return write_study(folder, study(routing, simulated, recipe.decode), [*routing.notes, *simulated.notes])


def _chances(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise MoexpError(f"acceptance {text!r}", where="--accept", valid="probabilities like 0.8,0.6,0.5") from error
