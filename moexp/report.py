"""From raw records to files: tables as CSV and Markdown. Imports no torch and runs no model.

A table has one CSV with full precision and every interval, and one Markdown file for reading: values with their
interval in one cell, at most 80 columns where the contents allow it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moexp import atomic
from moexp.errors import MoexpError
from moexp.metrics import Interval
from moexp.papers import load_paper
from moexp.records import RequestRecord, StepRecord, read_records
from moexp.rundir import artifact_path

MEASURED, EMULATED, SIMULATED, PAPER = "measured", "emulated", "simulated", "paper"

SETTINGS, PROBE, PROVENANCE = "settings.json", "probe.json", "provenance.json"
NEW_TOKENS = "new_tokens"  # in the settings: what a run with a time limit settled on, a prompt
PROBES = "probes.jsonl"
STEPS, REQUESTS = "steps.jsonl", "requests.jsonl"
"""Files of one platform's folder."""

RUN_SECTIONS = {
    "draftexpert": ("target", "draft", "decode", "store", "bench", "seed"),
    "ecospec": ("target", "draft", "head", "predictor", "ecospec", "store", "bench", "seed"),
}
"""What a paper's run folder depends on."""

Cell = str | int | float | bool | None
Row = dict[str, Cell]


@dataclass(frozen=True)
class View:
    """One Markdown table of a `Table`: what a reader compares, already as text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Table:
    """One table of a paper, ours beside theirs.

    Attributes:
        number, title: of the paper's table.
        columns: of the CSV, in order; a row may leave some out.
        rows: the CSV's.
        views: for the Markdown file.
        notes: what a reader must know, one paragraph each.
        sources: `Measured` runs that it is made of, for the provenance line.
    """

    number: int
    title: str
    columns: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[Measured] = field(default_factory=list)


@dataclass(frozen=True)
class Arm:
    """What one method did with one prompt."""

    request: RequestRecord
    steps: list[StepRecord]


@dataclass
class Measured:
    """Everything that a run folder keeps of one platform.

    Attributes:
        settings: what was run (methods, prompts, store).
        probe: what a step costs without loading, and what the link carries.
        arms: method -> request -> what it did; complete requests only.
        provenance: every invocation that measured something.
    """

    name: str
    tag: str
    settings: dict[str, Any]
    probe: dict[str, Any]
    arms: dict[str, dict[int, Arm]]
    provenance: list[dict[str, Any]]


# --- reading a run ---


def load_measured(folder: Path) -> Measured | None:
    """One platform's records; None where nothing is complete."""
    if not (folder / REQUESTS).exists():
        return None
    steps: dict[tuple[int, str], list[StepRecord]] = {}
    for step in read_records(folder / STEPS, StepRecord, resuming=True):
        steps.setdefault((step.request, step.method), []).append(step)
    arms: dict[str, dict[int, Arm]] = {}
    for request in read_records(folder / REQUESTS, RequestRecord, resuming=True):
        mine = steps.get((request.request, request.method), [])
        if sum(step.emitted for step in mine) != request.new_tokens:
            raise MoexpError(
                f"steps of request {request.request} by {request.method} are missing or doubled", where=str(folder)
            )
        arms.setdefault(request.method, {})[request.request] = Arm(request, mine)
    if not arms:
        return None
    settings = read_json(folder / SETTINGS) or {}
    return Measured(
        name=folder.name,
        tag=str(settings.get("tag", MEASURED)),
        settings=settings,
        probe=read_json(folder / PROBE) or {},
        arms=arms,
        provenance=invocations(folder),
    )


def invocations(folder: Path) -> list[dict[str, Any]]:
    """Every invocation that had a part in a folder's records; empty where that is not recorded."""
    return list((read_json(folder / PROVENANCE) or {}).get("invocations", []))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoexpError(f"not readable as JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise MoexpError("not a JSON object", where=str(path))
    return value


# --- cells ---


def put(row: Row, name: str, interval: Interval | None) -> None:
    """Sets `name`, `name_lo` and `name_hi` of a row."""
    row[name], row[f"{name}_lo"], row[f"{name}_hi"] = (None, None, None) if interval is None else interval[:3]


def text(value: Cell, digits: int = 2) -> str:
    """A value as a reader wants it; a missing one is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def text_of(row: Row, name: str, digits: int = 2) -> str:
    """`value (lo..hi)` of a row's column, in one cell."""
    lo, hi = row.get(f"{name}_lo"), row.get(f"{name}_hi")
    value = text(row.get(name), digits)
    return value if lo is None or hi is None else f"{value} ({text(lo, digits)}..{text(hi, digits)})"


# --- writing ---


def to_csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """CSV text; a missing value is an empty cell, a float has six significant digits.

    Raises:
        AssertionError: a row has a column that the table has not.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        assert row.keys() <= set(columns), sorted(row.keys() - set(columns))
        writer.writerow([_csv_cell(row.get(column)) for column in columns])
    return out.getvalue()


def to_markdown(table: Table) -> str:
    """The Markdown file of a table: its views, notes, and where the numbers come from."""
    parts = [f"# Table {table.number}: {table.title}", *map(view_text, table.views)]
    if table.notes:
        parts.append("\n".join(wrapped(note, "- ", "  ") for note in table.notes))
    if table.sources:
        parts.append("\n".join(wrapped(line) for line in provenance_lines(table.sources)))
    return "\n\n".join(parts) + "\n"


def provenance_lines(sources: Sequence[Measured]) -> list[str]:
    """Where a table's runs come from: command, commit, date, hardware, threads, seed, versions, and expert widths.

    Runs that differ only in when they began share a line.
    """
    groups: dict[str, list[Measured]] = {}
    for source in sources:
        line = provenance_text(source.provenance, threads=source.settings.get("threads", "unknown"))
        groups.setdefault(line, []).append(source)
    lines = []
    for line, members in groups.items():
        names = [
            member.name + (f" (experts {width} wide)" if (width := member.settings.get("expert_width")) else "")
            for member in members
        ]
        days = sorted({run["started"] for member in members for run in member.provenance})
        when = f"; {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
        lines.append(f"Provenance of {', '.join(names)}: {line}{when}.")
    return lines


def write_table(folder: Path, table: Table) -> list[Path]:
    """Writes `table_<n>.csv` and `table_<n>.md`; returns the two paths."""
    files = [folder / f"table_{table.number}.csv", folder / f"table_{table.number}.md"]
    for path, content in zip(files, (to_csv(table.columns, table.rows), to_markdown(table)), strict=True):
        atomic.write_text(path, content)
    return files


def rebuild(
    recipe: Any, paper: str = "draftexpert", *, out: Path | None = None, results: Path = Path("results")
) -> list[Path]:
    """`moexp report`: every table and figure that the recipe's raw records allow, without running anything.

    Args:
        recipe: whose `moexp bench` run is to be read.
        paper: whose tables.
        out: the run folder, if it is not the recipe's own.
        results: tables and figures go to `results/<recipe>/<paper>`.

    Raises:
        MoexpError: an unknown paper, or nothing has been measured yet.
    """
    load_paper(paper)
    folder = run_folder(recipe, out, paper)
    if not (folder / "recipe.yaml").exists():
        command = f"moexp bench --recipe {recipe.name}" + ("" if paper == "draftexpert" else f" --paper {paper}")
        raise MoexpError("nothing is measured", where=str(folder), valid=f"run: {command}")
    return write_results(recipe, paper, folder, results)


def write_results(
    recipe: Any,
    paper: str,
    folder: Path,
    results: Path,
    numbers: Collection[int] | None = None,
    figure: str | None = None,
) -> list[Path]:
    """Writes the tables `numbers` (all if None) and the figures that there are data for; returns their files.

    With `figure`, writes that figure alone.
    """
    from moexp.bench.figures import draw_figures
    from moexp.stages import trace_folder

    tables = write_tables(recipe, paper, folder, results, numbers) if figure is None else []
    return tables + draw_figures(recipe, paper, folder, trace_folder(recipe), results, figure)


def write_tables(
    recipe: Any, paper: str, folder: Path, results: Path, numbers: Collection[int] | None = None
) -> list[Path]:
    """Writes the tables `numbers` (all if None) of a run folder's records to `results/<recipe>/<paper>`."""
    from moexp.bench import draftexpert_tables, ecospec_tables

    make = {"draftexpert": draftexpert_tables.build_tables, "ecospec": ecospec_tables.build_tables}[paper]
    tables = make(folder, samples=recipe.bench.bootstrap_samples)
    wanted = [table for table in tables if numbers is None or table.number in numbers]
    return [path for table in wanted for path in write_table(results / recipe.name / paper, table)]


def run_folder(recipe: Any, out: Path | None = None, paper: str = "draftexpert") -> Path:
    """Where `moexp bench` keeps the recipe's raw records for a paper's tables."""
    return artifact_path("runs", recipe, *RUN_SECTIONS[paper]) if out is None else out


def _csv_cell(value: Cell) -> str:
    if value is None:
        return ""
    return format(value, ".6g") if isinstance(value, float) else str(value)


def view_text(view: View) -> str:
    """A Markdown table with its columns aligned in the source, numbers to the right."""
    rows = [[str(cell).replace("|", "\\|").replace("<", "\\<") for cell in row] for row in (view.header, *view.rows)]
    widths = [max(3, *(len(row[n]) for row in rows)) for n in range(len(view.header))]
    numeric = [
        bool(view.rows) and all(re.match(r"^([-+]?\d|-$)", row[n]) for row in view.rows) for n in range(len(widths))
    ]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = (
        "|" + "|".join("-" * (w + 1) + (":" if right else "-") for w, right in zip(widths, numeric, strict=True)) + "|"
    )
    title = [f"**{view.title}**", ""] if view.title else []
    return "\n".join([*title, line(rows[0]), rule, *map(line, rows[1:])])


def wrapped(paragraph: str, first: str = "", rest: str = "", width: int = 80) -> str:
    """A paragraph in lines of `width`; words and hyphenated ones stay whole."""
    import textwrap

    return textwrap.fill(
        paragraph, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def provenance_text(runs: Sequence[dict[str, Any]], *, threads: Any = None) -> str:
    """One line without dates; several invocations (a resumed run) show every command and commit once."""
    if not runs:
        return "not recorded"

    def once(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "unknown"

    def commit(run: dict[str, Any]) -> str | None:
        git = run.get("git") or {}
        return None if git.get("commit") is None else git["commit"][:12] + (" (dirty)" if git.get("dirty") else "")

    hardware, versions = runs[-1].get("hardware", {}), runs[-1].get("versions", {})
    memory = hardware.get("memory_gib")
    parts = [
        f"command `{once(run.get('command') for run in runs)}`",
        f"commit {once(map(commit, runs))}",
        f"{hardware.get('cpu') or 'unknown CPU'}, {hardware.get('cores')} cores"
        + (f", {memory} GiB" if memory else "")
        + "".join(f", {gpu}" for gpu in hardware.get("gpus") or ()),
        *([] if threads is None else [f"compute threads {threads}"]),
        f"seed {once(run.get('seed') for run in runs)}",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    ]
    return "; ".join(parts)
