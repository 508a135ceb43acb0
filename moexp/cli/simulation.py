"""What `moexp simulate` does with its flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moexp.base.errors import MoexpError
from moexp.config.locations import run_folder
from moexp.sim.validate import RESIDENT

if TYPE_CHECKING:
    from moexp.config.recipe import Recipe


def run_simulate(
    recipe: Recipe,
    *,
    platform: str | None = None,
    recording: Path | None = None,
    trace: Path | None = None,
    accept: str | None = None,
    sweep: str | None = None,
    validate: bool = False,
    out: Path | None = None,
    results: Path = Path("results"),
) -> list[Path]:
    """Simulates, and writes to `results/<recipe>/simulation`; returns the files.

    Args:
        recipe: its decode section is simulated; its run folder holds the recordings.
        platform: by name or file.
        recording: by default the resident run's of `moexp bench`.
        trace: a plain routing trace, in its place.
        accept: of a trace, the assumed acceptance by place ("0.8,0.6"); None: all are accepted.
        sweep: grids by file or shipped name, in place of all of the above; the recording counts if the file names none.
        validate: replay the recorded runs instead.
        out: the run folder, if it is not the recipe's own.

    Raises:
        MoexpError: flags that do not go together, or something that they name is not there.
    """
    folder = results / recipe.name / "simulation"
    if validate:
        from moexp.sim.validate import validate as check

        return check(run_folder(recipe, out), results, recipe.name)
    if sweep is not None:
        from moexp.sim.sweep import run_sweep
        from moexp.sim.sweep_file import find_sweep, load_sweep
        from moexp.tables.core.provenance import run_source
        from moexp.tables.sweep_figures import draw_sweep

        file = find_sweep(sweep)
        own = run_folder(recipe, out) / RESIDENT
        grids = load_sweep(file).with_default(recording or own)
        table = run_sweep(grids, folder / f"{file.stem}.parquet")
        return [table, *draw_sweep(table, [run_source(own.parent)] if grids.recording == str(own) else ())]
    if platform is None:
        raise MoexpError("no platform", where="--platform", valid="a name of `moexp platforms`, or a file")
    if recording is not None and trace is not None:
        raise MoexpError("a recording and a trace", where="--trace", valid="one of them")
    if accept is not None and trace is None:
        raise MoexpError("acceptance is assumed for traces only", where="--accept", valid="--trace")
    from moexp.sim.adapt import load_simulated
    from moexp.sim.sources import Source, open_source
    from moexp.sim.study import study, write_study

    place = trace or recording or run_folder(recipe, out) / RESIDENT
    source = Source(place, acceptance=_chances(accept), max_draft=recipe.decode.max_draft)
    routing = open_source(source)
    simulated = load_simulated(platform, routing.geometry, routing.expert_bytes)
    rows = study(routing, simulated, recipe.decode)
    return write_study(folder, rows, [*routing.notes, *simulated.notes])


def _chances(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise MoexpError(f"acceptance {text!r}", where="--accept", valid="probabilities like 0.8,0.6,0.5") from error
