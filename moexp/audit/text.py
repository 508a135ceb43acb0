"""An audit as a terminal table of 80 columns, as CSV and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from moexp.audit.lines import Line, number
from moexp.base.atomic import write_text
from moexp.tables.core.table import Row, View, to_csv, view_text

COLUMNS = (
    "id", "paper", "tag", "what", "formula", "inputs", "implied", "implied_lo", "implied_hi", "reported",
    "reported_in", "ratio", "relation", "unit", "rows", "agree", "row", "tolerance", "consistent", "finding", "note",
)  # fmt: skip

TITLES = {
    "draftexpert": "DraftExpert, arXiv 2607.24434",
    "ecospec": "EcoSpec, arXiv 2607.12696",
    "ours": "Our results",
}
HEADER = ("line", "what", "implied", "reported", "ratio")


def csv_row(line: Line) -> Row:
    """A line for `audit.csv`."""
    return {
        "id": line.id, "paper": line.paper, "tag": line.tag, "what": line.what, "formula": line.formula,
        "inputs": "; ".join(map(str, line.inputs)), "implied": line.implied, "implied_lo": line.low,
        "implied_hi": line.high, "reported": None if line.reported is None else line.reported.value,
        "reported_in": None if line.reported is None else line.reported.source, "ratio": line.ratio,
        "relation": line.relation, "unit": line.unit or None, "rows": line.rows,
        "agree": None if line.reported is None else line.agree if line.rows > 1 else int(line.gap == 0),
        "row": line.subject or None, "tolerance": line.tolerance, "consistent": line.consistent,
        "finding": line.finding, "note": line.note or None,
    }  # fmt: skip


def sections(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines by whose they are, in order."""
    return {name: group for name in TITLES if (group := [line for line in lines if line.paper == name])}


def terminal_tables(lines: Sequence[Line]) -> list[Table]:
    """One table a section; ids fold and words wrap, so that 80 columns are enough."""
    tables = []
    for name, group in sections(lines).items():
        table = Table(box=None, pad_edge=False, title=f"{TITLES[name]} ({_tags(group)})", title_justify="left")
        table.add_column(HEADER[0], max_width=26, overflow="fold")
        table.add_column(HEADER[1], overflow="fold")
        for head in HEADER[2:]:
            table.add_column(head, justify="right", no_wrap=True)
        for line in group:
            table.add_row(*_cells(line))
        tables.append(table)
    return tables


def write_files(folder: Path, recipe: str, lines: Sequence[Line], left_out: Sequence[str]) -> list[Path]:
    """Writes `audit.csv` and `audit.md`, each whole or not at all; returns the two paths."""
    files = [folder / "audit.csv", folder / "audit.md"]
    write_text(files[0], to_csv(COLUMNS, map(csv_row, lines)))
    write_text(files[1], markdown(recipe, lines, left_out))
    return files


def markdown(recipe: str, lines: Sequence[Line], left_out: Sequence[str]) -> str:
    """The Markdown file: a table a section, then each line's formula, inputs and finding."""
    parts = [
        f"# Audit: the papers' numbers, and those of `{recipe}`, by their own formulas",
        _wrapped(
            "Calculated from printed figures; nothing is run. `implied` is what a formula gives from the inputs, "
            "`ratio` is reported over implied. A paper's inputs are taken as rounded to their last printed digit, and "
            "figures whose ranges overlap are equal within rounding. A line for many rows says how many agree and "
            "shows the farthest from its formula. Lines of our results have a tolerance each, and `moexp audit` ends "
            "with exit code 1 where one is exceeded."
        ),
    ]
    for name, group in sections(lines).items():
        parts.append(f"## {TITLES[name]} ({_tags(group)})")
        parts.append(view_text(View("", HEADER, [_cells(line) for line in group])))
        parts.append("\n".join(_paragraph(line) for line in group))
    if left_out:
        parts += ["## Left out", "\n".join(_wrapped(f"{reason}.", "- ", "  ") for reason in left_out)]
    return "\n\n".join(parts) + "\n"


def _paragraph(line: Line) -> str:
    inputs = ", ".join(map(str, line.inputs))
    how = f" Formula: {line.formula}" + (f", with {inputs}." if inputs else ".")
    within = "" if line.tolerance is None else f" Tolerance {line.tolerance:g}; {line.tag}."
    note = f" Note: {line.note}." if line.note and line.implied is not None else ""
    return _wrapped(f"`{line.id}`: {line.finding}{how}{within}{note}", "- ", "  ")


def _cells(line: Line) -> list[str]:
    values = [line.implied, None if line.reported is None else line.reported.value]
    shown = ["-" if value is None else line.number(value) for value in values]
    what = f"{line.what} ({line.agree} of {line.rows})" if line.rows > 1 else line.what
    ratio = "-" if line.ratio is None else f"{line.ratio:.2f}" if line.ratio >= 0.1 else number(line.ratio)
    return [line.id, what, *shown, ratio]


def _tags(lines: Sequence[Line]) -> str:
    return ", ".join(dict.fromkeys(line.tag for line in lines))


def _wrapped(paragraph: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        paragraph, 80, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
