"""What DraftExpert's tables share: simulated rows, and the paper's rows beside those measured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moexp.papers import load_paper
from moexp.tables.core.run import Measured
from moexp.tables.core.table import Row, Table, View, text
from moexp.tables.core.tags import PAPER, SIMULATED
from moexp.tables.draftexpert.data import Run
from moexp.tables.draftexpert.labels import short
from moexp.tables.draftexpert.simulation import SimulatedRun

SIMULATED_NOTE = (
    "Simulated rows replay the routing of the resident run on the paper's platforms at its model's geometry "
    "(`moexp platforms`); their constants give the paper's AR rate. Acceptance is that of our drafters. Blocks are "
    "weighed alike although a shorter one would have been followed by another."
)


def simulated_rows(run: Run) -> Iterator[tuple[SimulatedRun, Row]]:
    """Each simulated platform, with the cells that all of its rows share."""
    for one in run.simulated:
        yield one, {"target": f"{run.target['name']} as {one.model}", "platform": one.platform, "tag": SIMULATED}


def add_simulated(table: Table, rows: Sequence[Row], key: str, columns: Sequence[str]) -> None:
    """Adds simulated rows, and a view of each figure beside the paper's for the model that it is priced for.

    Args:
        key: the column that names a method, drafter or policy.
        columns: figures, all in the paper's table too.
    """
    if not rows:
        return
    table.rows += rows
    lines = []
    for row in rows:
        model = str(row["target"]).rpartition(" as ")[2]
        wanted: dict[str, Any] = {"target": model, "platform": str(row["platform"]).upper(), key: row[key]}
        paper_rows = load_paper("draftexpert").table(table.number).rows
        beside = next((one for one in paper_rows if wanted.items() <= one.items()), {})
        cells = [cell for column in columns for cell in (text(row.get(column)), text(beside.get(column)))]
        lines.append([str(row["platform"]), short(row[key]), *cells])
    header = ["platform", key, *(cell for column in columns for cell in (column, PAPER))]
    title = f"Simulated: routing of this run, priced for {model} on the paper's platforms"
    table.views.append(View(title, header, lines))
    table.notes.append(SIMULATED_NOTE)


def add_paper(table: Table, **more: str) -> None:
    """Adds the paper's rows."""
    for row in load_paper("draftexpert").table(table.number).rows:
        table.rows.append({**more, **row, "tag": PAPER})


def paper_view(table: Table, columns: dict[str, str]) -> View:
    """The paper's rows as they are; `columns` are by heading."""
    lines = [[text(row.get(column), _digits(column)) for column in columns.values()] for row in table.paper_rows]
    return View("Paper", list(columns), lines)


def paper_by_platform(table: Table, keys: dict[str, str], shared: dict[str, str], column: str) -> View:
    """The paper's rows as the paper prints them: one a drafter or policy, `column`, a cost, once for each platform.

    Args:
        keys, shared: heading -> column, of what names a row and of what does not depend on the platform.
    """
    platforms = list(dict.fromkeys(str(row["platform"]) for row in table.paper_rows))
    merged: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in table.paper_rows:
        merged.setdefault(tuple(short(row[key]) for key in keys.values()), {})[str(row["platform"])] = row
    lines = []
    for names, by_platform in merged.items():
        first = next(iter(by_platform.values()))
        counts = [text(first.get(name), _digits(name)) for name in shared.values()]
        costs = [text(by_platform.get(platform, {}).get(column)) for platform in platforms]
        lines.append([*names, *counts, *costs])
    return View("Paper", [*keys, *shared, *(f"cost {platform}" for platform in platforms)], lines)


def _digits(column: str) -> int:
    return 3 if column in ("acceptance", "agreement") else 2


def say_missing(table: Table, sources: Sequence[Measured]) -> None:
    """A note where nothing is measured yet."""
    if not sources:
        table.notes.append(f"Not measured yet: run `moexp bench --table {table.number}`.")
