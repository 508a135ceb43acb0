"""The table and the figure of a race, from its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moexp import metrics
from moexp.base import atomic
from moexp.runtime.decoding.method import Method
from moexp.tables.core.plot import BLUE, GREY, Plot, write_plot
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import Bootstrapped, sameness, throughput, with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, View, number, set_interval, text, text_of, to_csv, view_text, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AR = "ar"
MEASURED_COLUMNS = ("tokens_per_s", "speedup", "alpha", "experts_per_layer", "bytes_per_token", "byte_bound")
COLUMNS = ["target", "platform", "method", "settings", "temperature", "prompts", "tag", "output", "identical"]
COLUMNS += [*with_ends(*MEASURED_COLUMNS), "prefetch_hit", "prefetch_waste", "prefetch_coverage"]
COLUMNS += [f"{part}_ms" for part in metrics.TIME_PARTS]
NOTES = (
    "`speedup` is tokens (counted by ids) a second over AR's: same prompts, same store, methods in turns of a second; "
    "intervals are 95% bootstrap intervals over prompts. The byte bound is alpha k / E. `output` is exact where every "
    "prompt's ids are AR's.",
    "Milliseconds are those of a token; `wait` is stalls for experts, `rest` holds a predictor's time.",
    "`hit` is the share of prefetched experts that were then demanded, `covered` that of the experts demanded by "
    "verification that a prefetch had brought.",
)


def race_rows(name: str, found: Measured, methods: Sequence[Method], top_k: int, samples: int) -> list[Row]:
    """A row a method, in this order.

    Args:
        name: of the target.
        methods: those that raced, AR among them.
        samples: of the bootstrap.
    """
    run = Bootstrapped(samples=samples)
    ar, temperature, rows = found.arms[AR], found.settings["temperature"], []
    for method in methods:
        arms = found.arms[method.label]
        steps = [step for arm in arms.values() for step in arm.steps]
        row: Row = {
            "target": name, "platform": found.name, "method": method.label, "tag": found.tag, "prompts": len(arms),
            "temperature": temperature, "settings": dataclasses.replace(method, name="").label,
        }  # fmt: skip
        row |= sameness(arms, ar, temperature)
        row |= throughput(run, arms, None if method.is_ar else ar, top_k)
        set_interval(row, "experts_per_layer", run.over(arms, lambda arm: metrics.experts_per_layer(arm.steps)))
        for column in ("prefetch_hit", "prefetch_waste", "prefetch_coverage"):
            row[column] = getattr(metrics, column)(steps).value
        rows.append(row)
    return rows


def write_race(folder: Path, name: str, found: Measured, rows: list[Row]) -> list[Path]:
    """Writes the table as CSV and Markdown, and the figure; returns the files."""
    files = [folder / f"{name}.csv", folder / f"{name}.md"]
    atomic.write_text(files[0], to_csv(COLUMNS, rows))
    sources = provenance_lines([found])
    speed = [
        [str(row["method"]), *(text_of(row, name) for name in MEASURED_COLUMNS[:2]), *_texts(row, "alpha", "output")]
        for row in rows
    ]
    loads = [
        [
            str(row["method"]), *_texts(row, "experts_per_layer"), _scaled(row, "bytes_per_token", 1e-6),
            *_texts(row, "byte_bound", "prefetch_hit", "prefetch_coverage"),
        ]
        for row in rows
    ]  # fmt: skip
    parts = [f"{part}_ms" for part in metrics.TIME_PARTS]
    heads = [part.replace("_", " ") for part in metrics.TIME_PARTS]
    times = [[str(row["method"]), *_texts(row, *parts, digits=1)] for row in rows]
    what = f"{found.name} ({found.tag}), T = {found.settings['temperature']:g}, {rows[0]['prompts']} prompts"
    settings = [f"- `{row['method']}`: {row['settings']}" for row in rows[1:]]
    page = [
        f"# Race on {found.name}",
        view_text(View(what, ["method", "tokens/s", "speedup", "alpha", "output"], speed)),
        view_text(View("Experts", ["method", "E", "MB/token", "alpha k/E", "hit", "covered"], loads)),
        view_text(View("A token's milliseconds", ["method", *heads], times)),
        "\n".join(settings),
        "\n".join(wrapped(note, "- ", "  ") for note in NOTES),
        "\n".join(map(wrapped, sources)),
    ]
    atomic.write_text(files[1], "\n\n".join(page) + "\n")
    shown = [row for row in rows if row["speedup"] is not None]
    title = f"Speedup over AR, {found.name} ({found.tag})"
    plot = Plot(name, title, COLUMNS, shown, _draw, 1.0 + 0.35 * len(shown), sources)
    return [*files, *write_plot(folder, plot)]


def _texts(row: Row, *names: str, digits: int = 2) -> list[str]:
    return [text(row.get(name), digits) for name in names]


def _scaled(row: Row, name: str, factor: float) -> str:
    value = row.get(name)
    return text(None if value is None else number(value) * factor, 1)


def _draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    places = range(len(rows))
    values = [number(row["speedup"]) for row in rows]
    axes.barh(places, values, 0.5, color=BLUE)
    for place, row, value in zip(places, rows, values, strict=True):
        if row["speedup_lo"] is not None:
            ends = [number(row["speedup_lo"]), number(row["speedup_hi"])]
            axes.plot(ends, [place, place], color="black", linewidth=1, marker="|", markersize=5)
        axes.text(0, place, f" {value:.2f}", va="center", fontsize=7, color="white")
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_yticks(places, [str(row["method"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("speedup over AR")
    axes.grid(axis="x")
