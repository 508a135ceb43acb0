"""What a reader wants first: each paper's main claims and the exactness gate, from the CSV files of a results folder.

Nothing is computed anew: every value stands in a table of the same folder. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from moexp.tables.core.table import View, read_rows
from moexp.tables.core.tags import PAPER

Rows = Sequence[dict[str, str]]

DRAFT_CLAIMS = (
    # figure, table, column, what a row must say, digits
    ("speedup over AR, truncation and prefetch", 2, "speedup", {"method": "draft-expert", "workload": "mean"}, 2),
    ("tokens/s, the same", 2, "tokens_per_s", {"method": "draft-expert", "workload": "mean"}, 2),
    ("tokens/s, AR", 2, "tokens_per_s", {"method": "ar", "workload": "mean"}, 2),
    ("byte bound alpha k / E", 2, "byte_bound", {"method": "draft-expert", "workload": "mean"}, 2),
    ("acceptance, K = 4", 3, "acceptance", {"drafter": "draft-expert"}, 3),
    ("acceptance on held-out contexts, K = 4", 3, "acceptance_ctx", {"drafter": "draft-expert"}, 3),
    ("unique draft experts a block", 3, "unique_draft", {"drafter": "draft-expert"}, 1),
    ("verification in AR steps", 4, "verify_cost", {"policy": "confidence-expansion+prefetch"}, 2),
    ("prefetch hit", 4, "prefetch_hit", {"policy": "confidence-expansion+prefetch"}, 2),
)


def headline(folder: Path) -> list[View]:
    """One view a paper, of those tables that are there."""
    return [view for view in (_draftexpert(folder), _ecospec(folder)) if view is not None]


def gate_line(folder: Path) -> str | None:
    """What the exactness gate found, in a sentence; None where it was not run."""
    rows = read_rows(folder / "eval.csv")
    if not rows:
        return None
    compared, differing = (sum(int(row.get(name) or 0) for row in rows) for name in ("logits_rows", "differing_rows"))
    tags = ", ".join(sorted({row.get("tag") or "" for row in rows}))
    return (
        f"Exactness ({tags}): {differing:,} of {compared:,} logits rows of {len(rows)} methods and controls "
        "differ from AR's in any bit."
    )


def _draftexpert(folder: Path) -> View | None:
    """A claim a line, a platform a column: those of table 2."""
    tables = {number: read_rows(folder / "draftexpert" / f"table_{number}.csv") for number in (2, 3, 4)}
    platforms = {row["platform"]: row["tag"] for row in tables[2] if row["tag"] != PAPER}
    lines = []
    for name, number, column, keys, digits in DRAFT_CLAIMS:
        rows = [row for row in tables[number] if row.get(column) and keys.items() <= row.items()]
        measured = {row["platform"]: _value(row, column, digits) for row in rows if row["tag"] != PAPER}
        paper = _span([row[column] for row in rows if row["tag"] == PAPER], digits)
        if measured.keys() & platforms.keys():
            lines.append([name, *(measured.get(platform, "-") for platform in platforms), paper])
    columns = [f"{platform} ({tag})" for platform, tag in platforms.items()]
    return View("DraftExpert", ["", *columns, "paper, its targets and platforms"], lines) if lines else None


def _ecospec(folder: Path) -> View | None:
    """By confidence and by marginal cost, of the same trees at T = 0."""
    rows = [
        row
        for row in read_rows(folder / "ecospec" / "table_1.csv")
        if row.get("temperature") == "0" and row.get("workload", "").lower() == "average"
    ]
    lines = []
    for plain, chosen in _pairs(rows):
        values = [_value(row, name, 2) for name in ("speedup", "alpha", "E") for row in (plain, chosen)]
        lines.append([plain["method"], chosen["platform"] or chosen["model"], *values, plain["tag"]])
    names = ["speedup", "+ EcoSpec", "alpha", "+ EcoSpec", "E", "+ EcoSpec"]
    title = "EcoSpec, T = 0: trees selected by confidence, and by marginal cost (+ EcoSpec)"
    return View(title, ["drafter", "where", *names, "tag"], lines) if any(r["tag"] != PAPER for r in rows) else None


def _pairs(rows: Rows) -> Iterable[tuple[dict[str, str], dict[str, str]]]:
    """Averages by confidence and by marginal cost: ours of one platform and drafter, then the paper's of one target."""
    measured = {(row["platform"], row["method"]): row for row in rows if row["tag"] != PAPER}
    for (platform, method), row in measured.items():
        if (platform, f"{method} + EcoSpec") in measured:
            yield row, measured[platform, f"{method} + EcoSpec"]
    paper = [row for row in rows if row["tag"] == PAPER]
    chosen = {row["model"]: row for row in paper if row["method"] == "EcoSpec"}
    for row in paper:
        if row["method"] != "EcoSpec" and row["model"] in chosen:
            yield row, chosen[row["model"]]


def _value(row: dict[str, str], column: str, digits: int) -> str:
    value, lo, hi = (row.get(f"{column}{end}") for end in ("", "_lo", "_hi"))
    if not value:
        return "-"
    shown = f"{float(value):.{digits}f}"
    return f"{shown} ({float(lo):.{digits}f}..{float(hi):.{digits}f})" if lo and hi else shown


def _span(values: Iterable[str], digits: int) -> str:
    """The lowest and the highest of the paper's values."""
    numbers = sorted({float(value) for value in values})
    if not numbers:
        return "-"
    ends = [f"{value:.{digits}f}" for value in (numbers[0], numbers[-1])]
    return " to ".join(dict.fromkeys(ends))
