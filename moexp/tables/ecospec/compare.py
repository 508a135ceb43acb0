"""`moexp compare`: EcoSpec's Table 1 of several targets in one, the paper's beside it, and what marginal cost saves.

Read from the tables in the results folders; nothing is run. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.base.provenance import collect_provenance
from moexp.papers import load_paper
from moexp.tables.core.plot import BLUE, GREY, ORANGE, Axes, Figure, Plot, write_plot
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Row, Table, View, number, read_rows, text, write_table
from moexp.tables.core.tags import PAPER
from moexp.tables.ecospec.data import AR, CHEAPEST, ECOSPEC, method_name, parts_of
from moexp.tables.ecospec.parts import AVERAGE
from moexp.tables.ecospec.tables_1_and_13 import NAMES, PAPER_COLUMNS

FOLDER = "ecospec-targets"
MEMORY = "resident"
VALUES = ("speedup", "alpha", "E")
NUMBERS = ("temperature", "prompts", "uniform", *with_ends(*VALUES), *PAPER_COLUMNS[1:])
COLUMNS = ["model", "platform", "method", "temperature", "workload", "prompts", "tag", "uniform"]
COLUMNS += [*with_ends(*VALUES), *PAPER_COLUMNS]
NOTES = (
    "The CSV has the intervals, every workload and the paper's own rows. `uniform` is what independent uniform "
    "routing of as many rows would touch.",
    "The paper's figures stand beside those of the target that has as many routed experts and the same top-k. Its "
    "models are larger and read their experts from GPU memory.",
    "`saved` is how much lower E is by marginal cost than by confidence, and `at most` how much lower it is for the "
    "cheapest of all prefix-closed choices of as many nodes from the same trees, whatever their probability (Table "
    "10); `lost` is the acceptance length that selection by marginal cost gives up.",
    "Rows are those of `results/<model>/ecospec/table_1.csv`; where they were measured stands in `table_1.md` beside.",
)


def compare(names: Sequence[str], results: Path = Path("results"), out: Path | None = None) -> list[Path]:
    """Writes `table_1.csv`, `table_1.md` and `figure_targets` of several recipes' EcoSpec results.

    Args:
        names: of recipes whose tables lie under `results`.
        out: the folder to write to, in place of `results/ecospec-targets`.

    Returns:
        the files.

    Raises:
        MoexpError: a recipe is named twice or has no Table 1, or that is not one.

    Paper: EcoSpec Table 1.
    """
    doubled = [name for index, name in enumerate(names) if name in names[:index]]
    if doubled:
        raise MoexpError(f"{doubled[0]} is named twice")
    rows = [row for name in names for row in _table_1(results, name)]
    lowest = {name: _lowest(results, name) for name in names}
    paper = load_paper("ecospec").table(1)
    paper_rows = [{NAMES.get(name, name): cell for name, cell in row.items()} | {"tag": PAPER} for row in paper.rows]
    table = Table(1, paper.title + ", by target", COLUMNS, [*rows, *paper_rows])
    table.views += [*_views(rows), _saved(rows, lowest)]
    table.notes += [*NOTES, f"Put together by: {provenance_text([collect_provenance(seed=0)])}."]
    folder = results / FOLDER if out is None else out
    bars = [row for row in _averages(rows) if (row["platform"], row["temperature"]) == (MEMORY, 0.0)]
    height = 1.0 + 0.3 * len(_bars_of(bars))
    plot = Plot("targets", "What marginal cost saves, by target", COLUMNS, bars, _draw, height, [NOTES[-1]])
    return [*write_table(folder, table), *write_plot(folder, plot)]


def _table_1(results: Path, name: str) -> list[Row]:
    """Our rows of a recipe's Table 1."""
    path = results / name / "ecospec" / "table_1.csv"
    rows = [row for row in read_rows(path) if row.get("tag") != PAPER]
    if not rows:
        valid = f"run: moexp bench --paper ecospec --table 1 --recipe {name}"
        raise MoexpError("no EcoSpec Table 1 of ours", where=str(path), valid=valid)
    missing = [column for column in COLUMNS if column not in rows[0]]
    if missing:
        raise MoexpError(f"no column {missing[0]!r}", where=str(path), valid=", ".join(COLUMNS))
    try:
        return [{name: _value(name, row[name]) for name in COLUMNS} for row in rows]
    except ValueError as error:
        raise MoexpError(f"not a number: {error}", where=str(path)) from error


def _value(column: str, cell: str) -> str | float | None:
    if not cell:
        return None
    return float(cell) if column in NUMBERS else cell


def _lowest(results: Path, name: str) -> dict[tuple[str, str], float]:
    """The lowest E that the trees allow, by platform and drafter; empty where Table 10 was not made."""
    rows = read_rows(results / name / "ecospec" / "table_10.csv")
    cheapest = [row for row in rows if row.get("predictor") == CHEAPEST and row.get("experts_per_layer")]
    return {(row["platform"], parts_of(row["method"])[0]): float(row["experts_per_layer"]) for row in cheapest}


def _averages(rows: Sequence[Row]) -> list[Row]:
    """Rows over all workloads, but AR's."""
    return [row for row in rows if row["workload"] == AVERAGE and row["method"] != AR]


def _views(rows: Sequence[Row]) -> list[View]:
    """Averages over the workloads, a view for each platform and temperature."""
    header = ["model", "method", *(name for value in VALUES for name in (value, "paper")), "uniform"]
    columns = ["model", "method", *(name for value in VALUES for name in (value, f"paper_{value}")), "uniform"]
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in _averages(rows):
        key = (f"{row['platform']} ({row['tag']})", number(row["temperature"]))
        groups.setdefault(key, []).append(row)
    return [
        View(f"{name}, T = {temperature:g}, all workloads", header, [[text(row[c]) for c in columns] for row in group])
        for (name, temperature), group in groups.items()
    ]


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Averages by confidence and by marginal cost, of the same drafter in the same run."""
    keys = ("model", "platform", "temperature", "method")
    average = {tuple(row[key] for key in keys): row for row in _averages(rows)}
    pairs = []
    for (*run, method), row in average.items():
        chosen = average.get((*run, method_name(str(method), ECOSPEC)))
        if chosen is not None:
            pairs.append((row, chosen))
    return pairs


def _saved(rows: Sequence[Row], lowest: dict[str, dict[tuple[str, str], float]]) -> View:
    """E saved and acceptance length lost, in percent, ours beside the paper's."""
    lines = []
    for row, chosen in _pairs(rows):
        bound = lowest[str(row["model"])].get((str(row["platform"]), str(row["method"])))
        most = None if bound is None or number(row["temperature"]) else 1 - bound / number(row["E"])
        lines.append([
            str(row["model"]), str(row["platform"]), f"{number(row['temperature']):g}", str(row["method"]),
            _percent(_less(row, chosen, "E")), _percent(most), _percent(_less(row, chosen, "paper_E")),
            _percent(_less(row, chosen, "alpha")), _percent(_less(row, chosen, "paper_alpha")),
        ])  # fmt: skip
    header = ["model", "experts", "T", "drafter", "saved", "at most", "paper", "lost", "paper"]
    return View("What marginal cost saves of E, and loses of alpha", header, lines)


def _less(row: Row, chosen: Row, name: str) -> float | None:
    before, after = row[name], chosen[name]
    return None if before is None or after is None else 1 - number(after) / number(before)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


# --- the figure ---


def _bars_of(rows: Sequence[Row]) -> list[tuple[str, Row, Row, str]]:
    """A label, the row by confidence, that by marginal cost, and the prefix of the columns that are drawn."""
    bars = []
    for row, chosen in _pairs(rows):
        bars.append((f"{row['model']}, {row['method']}", row, chosen, ""))
        if row["paper_E"] is not None and chosen["paper_E"] is not None:
            bars.append((f"{row['paper_model']}, {row['method']} (paper)", row, chosen, "paper_"))
    return bars


def _draw(figure: Figure, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    bars = _bars_of(rows)
    _draw_bars(left, bars, "E", "E, unique experts a layer and step")
    _draw_bars(right, bars, "speedup", "speedup over AR, experts in memory")
    right.axvline(1, color=GREY, linewidth=1)
    left.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=7)
    left.set_ylim(len(bars) - 0.4, -0.6)
    figure.legend(*left.get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=7)


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, Row, Row, str]], name: str, title: str) -> None:
    for y, (_, row, chosen, prefix) in enumerate(bars):
        for shift, one, color, label in ((-0.2, row, ORANGE, "confidence"), (0.2, chosen, BLUE, "marginal cost")):
            value = number(one[f"{prefix}{name}"])
            axes.barh(
                y + shift, value, 0.36, color="white" if prefix else color, edgecolor=color, linewidth=0.8,
                label=label if y == 0 else None,
            )  # fmt: skip
            axes.text(value, y + shift, f" {value:.2f}", va="center", fontsize=6)
    axes.set_title(title)
    axes.margins(x=0.15)  # for the values beside the bars
    axes.grid(axis="x")
