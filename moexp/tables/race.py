"""The table and the figure of a race, from its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moexp import metrics
from moexp.base import atomic
from moexp.runtime.decoding.method import Method
from moexp.tables.core.plot import BLUE, GREY, Figure, Plot, draw_interval, write_plot
from moexp.tables.core.provenance import provenance_lines
from moexp.tables.core.rows import Bootstrapped, sameness, steps_of, throughput, with_ends
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Columns, Row, number, shown, to_csv, view_of, view_text, wrapped

AR = "ar"
COLUMNS = ["target", "platform", "method", "settings", "temperature", "prompts", "tag", "output", "identical"]
COLUMNS += with_ends("tokens_per_s", "speedup", "alpha", "experts_per_layer", "bytes_per_token", "byte_bound")
COLUMNS += ["prefetch_hit", "prefetch_waste", "prefetch_coverage"]
COLUMNS += [f"{part}_ms" for part in metrics.TIME_PARTS]

VIEWS: dict[str, Columns] = {
    "Experts": {
        "method": "method", "E": "experts_per_layer", "MB/token": shown("bytes_per_token", 1, factor=1e-6),
        "alpha k/E": "byte_bound", "hit": "prefetch_hit", "covered": "prefetch_coverage",
    },
    "A token's milliseconds": {
        "method": "method", **{part.replace("_", " "): shown(f"{part}_ms", 1) for part in metrics.TIME_PARTS},
    },
}  # fmt: skip
SPEED: Columns = {
    "method": "method", "tokens/s": shown("tokens_per_s", ends=True), "speedup": shown("speedup", ends=True),
    "alpha": "alpha", "output": "output",
}  # fmt: skip

NOTES = (
    "`speedup` is tokens (counted by ids) a second over AR's: same prompts, same store, methods in turns of a second; "
    "intervals are 95% bootstrap intervals over prompts. The byte bound is alpha k / E. `output` is exact where every "
    "prompt's ids are AR's.",
    "Milliseconds are those of a token; `wait` is stalls for experts, `rest` holds a predictor's time.",
    "`hit` is the share of prefetched experts that were then demanded, `covered` that of the experts demanded by "
    "verification that a prefetch had brought.",
)


def race_rows(name: str, measured: Measured, methods: Sequence[Method], top_k: int, samples: int) -> list[Row]:
    """A row a method, in this order.

    Args:
        name: of the target.
        methods: those that raced, AR among them.
        samples: of the bootstrap.
    """
    run = Bootstrapped(samples=samples)
    ar, temperature, rows = measured.arms[AR], measured.settings["temperature"], []
    for method in methods:
        arms = measured.arms[method.label]
        row: Row = {
            "target": name, "platform": measured.name, "method": method.label, "tag": measured.tag,
            "prompts": len(arms), "temperature": temperature, "settings": dataclasses.replace(method, name="").label,
        }  # fmt: skip
        row |= sameness(arms, ar, temperature)
        row |= throughput(run, arms, None if method.is_ar else ar, top_k)
        row |= run.cells(arms, experts_per_layer=metrics.experts_per_layer)
        for column in ("prefetch_hit", "prefetch_waste", "prefetch_coverage"):
            row[column] = getattr(metrics, column)(steps_of(arms)).value
        rows.append(row)
    return rows


def write_race(folder: Path, name: str, measured: Measured, rows: list[Row]) -> list[Path]:
    """Writes the table as CSV and Markdown, and the figure; returns the files."""
    files = [folder / f"{name}.csv", folder / f"{name}.md"]
    atomic.write_text(files[0], to_csv(COLUMNS, rows))
    sources, machine = provenance_lines([measured]), f"{measured.name} ({measured.tag})"
    title = f"{machine}, T = {measured.settings['temperature']:g}, {rows[0]['prompts']} prompts"
    page = [
        f"# Race on {measured.name}",
        view_text(view_of(title, rows, SPEED)),
        *(view_text(view_of(heading, rows, columns)) for heading, columns in VIEWS.items()),
        "\n".join(f"- `{row['method']}`: {row['settings']}" for row in rows[1:]),
        "\n".join(wrapped(note, "- ", "  ") for note in NOTES),
        "\n".join(map(wrapped, sources)),
    ]
    atomic.write_text(files[1], "\n\n".join(page) + "\n")
    bars = [row for row in rows if row["speedup"] is not None]
    plot = Plot(name, f"Speedup over AR, {machine}", COLUMNS, bars, _draw, 1.0 + 0.35 * len(bars), sources)
    return [*files, *write_plot(folder, plot)]


def _draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    values = [number(row["speedup"]) for row in rows]
    axes.barh(range(len(rows)), values, 0.5, color=BLUE)
    for y, (row, value) in enumerate(zip(rows, values, strict=True)):
        draw_interval(axes, row, "speedup", y, color="black", linewidth=1, marker="|", markersize=5)
        axes.text(0, y, f" {value:.2f}", va="center", fontsize=7, color="white")
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_yticks(range(len(rows)), [str(row["method"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("speedup over AR")
    axes.grid(axis="x")
