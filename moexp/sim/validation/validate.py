"""`moexp simulate --validate`: recorded runs replayed, times and counts held against the measured ones.

Nothing is fitted to the times that are validated. Computing and the link are those of the probes between the run's
requests, each request priced with the nearest ones (`moexp.sim.validation.probe_prices`). A run without such probes is
priced by the run folder's resident platform and the one probe at its beginning. `time_error_loo` is the error that a
single factor leaves: the median of measured over simulated time of the other methods of the same run (leave one out).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.metrics import Ratio, quotient
from moexp.records import ProbeRecord, RequestRecord, StepRecord, read_records
from moexp.runtime.recording.files import ROUTING, Recording, read_recording
from moexp.sim.machine.machine import MachineModel
from moexp.sim.validation.fit import Fit, fit_steps, has_link, link_of
from moexp.sim.validation.probe_prices import Prices, Span
from moexp.sim.validation.replay import EXACT, Comparison, compare, replay
from moexp.tables.core.run import PROBE, PROBES, REQUESTS, SETTINGS, STEPS, read_json
from moexp.tables.core.table import Row, View, text, to_csv, view_text

RESIDENT = "resident"
SHOWN_COUNTS = (*EXACT, "hit", "late", "cancelled")
COLUMNS = [
    "run", "method", "tag", "cycles", "tokens", "measured_s", "simulated_s", "time_error", "counters_match",
    "totals_match", "measured_speedup", "simulated_speedup", "time_factor_loo", "time_error_loo", "measured_draft_s",
    "simulated_draft_s", "differing", *(f"{name}_{which}" for name in SHOWN_COUNTS
    for which in ("measured", "simulated")), "calibrated_on",
]  # fmt: skip


def validate(folder: Path, results: Path, name: str) -> list[Path]:
    """Replays every recorded platform of a run folder.

    Args:
        folder: of `moexp bench`.
        results: `validation.csv` and `.md` go to `<results>/<name>/simulation`.

    Raises:
        MoexpError: nothing is recorded there, or nothing to calibrate on.
    """
    runs = sorted(path.parent for path in folder.glob(f"*/{ROUTING}") if path.parent.name != RESIDENT)
    if not runs:
        raise MoexpError("no recorded run", where=str(folder), valid="run: moexp bench")
    fit = resident_fit(folder / RESIDENT)
    known = [run for run in runs if has_link(read_recording(run).info.store, read_json(run / PROBE) or {})]
    if not known:
        raise MoexpError("no recorded run whose link is known", where=str(folder), valid="disk, or a paced platform")
    rows = [row for run in known for row in validate_platform(run, fit)]
    left_out = [run.name for run in runs if run not in known]
    path = results / name / "simulation" / "validation.csv"
    atomic.write_text(path, to_csv(COLUMNS, rows))
    atomic.write_text(path.with_suffix(".md"), _markdown(name, rows, left_out))
    return [path, path.with_suffix(".md")]


# --- a recorded run ---


def resident_fit(folder: Path) -> Fit:
    """Costs from a run folder's resident platform."""
    if not (folder / ROUTING).exists():
        raise MoexpError("no resident run to calibrate on", where=str(folder), valid="run: moexp bench --table 3")
    recording = read_recording(folder)
    return fit_steps(complete_steps(folder), recording.info.methods, len(recording.info.geometry.layers))


def complete_steps(folder: Path) -> list[StepRecord]:
    """Steps of a platform's complete requests."""
    done = {(one.request, one.method) for one in read_records(folder / REQUESTS, RequestRecord, resuming=True)}
    steps = read_records(folder / STEPS, StepRecord, resuming=True)
    return [step for step in steps if (step.request, step.method) in done]


def machine_of(recording: Recording, fit: Fit, probe: dict[str, object]) -> MachineModel:
    """The machine that a recorded platform was, without a look at its times.

    Args:
        probe: of the platform; its `compute_s`, an AR step with the platform's own experts in memory, sets the cost of
            an expert where it is given.
    """
    info = recording.info
    layers, store = len(info.geometry.layers), info.store
    compute_s = probe.get("compute_s")
    if isinstance(compute_s, float):
        fit = fit.rescaled(compute_s, layers * info.geometry.top_k)
    return MachineModel(link_of(store, probe), fit.costs(layers), store["moved_bytes"], store["capacity"])


def request_prices(
    folder: Path, recording: Recording, model: MachineModel
) -> Callable[[int, str], MachineModel] | None:
    """`model` as it was around each request, by request and method; None where no probes, or not all kinds, were taken
    in a platform's run.
    """
    if not (folder / PROBES).exists():
        return None
    prices = Prices(read_records(folder / PROBES, ProbeRecord, resuming=True))
    if not prices.complete:
        return None
    spans = spans_of(read_records(folder / REQUESTS, RequestRecord, resuming=True))
    numbers = recording.info.geometry.layers
    layers, moe_layers = max(numbers) + 1, len(numbers)

    def price(request: int, method: str) -> MachineModel:
        span = spans.get((request, method), (len(spans), len(spans) + 1))
        link = prices.link(span, model.link, model.expert_bytes)
        return replace(model, costs=prices.costs(span, layers, moe_layers), link=link)

    return price


def spans_of(requests: Iterable[RequestRecord]) -> dict[tuple[int, str], Span]:
    """For each request and method, the requests that shared its time: methods take turns on a prompt, and their records
    follow each other.
    """
    spans: dict[tuple[int, str], Span] = {}
    for _, group in itertools.groupby(requests, key=lambda one: one.request):
        together = [(one.request, one.method) for one in group]
        spans |= dict.fromkeys(together, (len(spans), len(spans) + len(together)))
    return spans


# --- rows ---


def validate_platform(folder: Path, fit: Fit) -> list[Row]:
    """One platform's methods, each a row."""
    recording = read_recording(folder)
    probe, settings = read_json(folder / PROBE) or {}, read_json(folder / SETTINGS) or {}
    model = machine_of(recording, fit, probe)
    prices = request_prices(folder, recording, model)
    compared = compare(complete_steps(folder), replay(recording, model, prices=prices))
    common: Row = {
        "run": folder.name,
        "tag": settings.get("tag"),
        "calibrated_on": f"{RESIDENT} ({fit.steps} cycles)" if prices is None else "probes between the requests",
    }
    return [common | _row(one, compared) for one in compared]


def _row(one: Comparison, compared: Sequence[Comparison]) -> Row:
    others = [other.measured_s / other.simulated_s for other in compared if other is not one and other.simulated_s]
    factor = statistics.median(others) if others else None
    row: Row = {
        "method": one.method,
        "cycles": one.cycles,
        "tokens": one.tokens,
        "measured_s": one.measured_s,
        "simulated_s": one.simulated_s,
        "time_error": one.time_error,
        "counters_match": "yes" if one.counters_match else "no",
        "totals_match": "yes" if one.totals_match else "no",
        "time_factor_loo": factor,
        "time_error_loo": None if factor is None else one.simulated_s * factor / one.measured_s - 1,
        "measured_draft_s": one.measured_draft_s,
        "simulated_draft_s": one.simulated_draft_s,
        "differing": " ".join(f"{name}:{count}" for name, count in one.differing.items()) or None,
    }
    ar = next((other for other in compared if other.method == "ar" and other is not one), None)
    if ar is not None:
        row["measured_speedup"] = quotient(Ratio(one.tokens, one.measured_s), Ratio(ar.tokens, ar.measured_s))
        row["simulated_speedup"] = quotient(Ratio(one.tokens, one.simulated_s), Ratio(ar.tokens, ar.simulated_s))
    for name in SHOWN_COUNTS if one.counts else ():
        row[f"{name}_measured"], row[f"{name}_simulated"] = one.counts[name]
    return row


def _markdown(name: str, rows: Sequence[Row], left_out: Sequence[str]) -> str:
    header = [
        "run", "method", "cycles", "measured s", "simulated s", "error", "speedup", "simulated", "counters", "LOO"
    ]  # fmt: skip
    shown = [
        [
            *(text(row[key]) for key in ("run", "method", "cycles", "measured_s", "simulated_s")),
            _percent(row["time_error"]),
            text(row.get("measured_speedup")),
            text(row.get("simulated_speedup")),
            _counters(row),
            _percent(row["time_error_loo"]),
        ]
        for row in rows
    ]
    parts = [
        f"# The simulator against the runtime, `{name}`",
        view_text(View("", header, shown)),
        "Each run is replayed from its recorded routing. Computing and the link are priced by the probes that were "
        "taken between the run's requests, on text of their own: of a probe's steps only the computing counts, and the "
        "link is that of bursts through an idle store. A run without probes is priced by the resident run and a probe "
        "at its beginning. Nothing is fitted to the times shown. Counters: demanded, "
        "covered, missed, prefetched, used and wasted, equal in every cycle or the number of cycles in which they are "
        "not. LOO: the error that is left after one factor from the other methods of the run.",
        *([f"Left out, for nobody probed their link: {', '.join(left_out)}."] if left_out else []),
    ]
    return "\n\n".join(parts) + "\n"


def _counters(row: Row) -> str:
    if row["counters_match"] == "yes":
        return "equal"
    return f"{row['differing']}" + (", equal in all" if row["totals_match"] == "yes" else "")


def _percent(value: object) -> str:
    return f"{value:+.1%}" if isinstance(value, float) else "-"
