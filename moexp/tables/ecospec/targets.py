"""`moexp compare`: EcoSpec's Table 1 of several targets in one, the paper's beside it, and what marginal cost saves.

Read from the tables in the results folders; nothing is run. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moexp.base.errors import MoexpError
from moexp.base.provenance import collect_provenance
from moexp.papers import load_paper
from moexp.tables.core.plot import BLUE, GREY, ORANGE, Plot, number, write_plot
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Row, Table, View, read_rows, text, write_table
from moexp.tables.core.tags import PAPER
from moexp.tables.ecospec.data import AR, CHEAPEST, ECOSPEC, method_name, parts_of
from moexp.tables.ecospec.rows import AVERAGE, PAPER_COLUMNS, TABLE_1_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """
    doubled = [name for place, name in enumerate(names) if name in names[:place]]
    if doubled:
        raise MoexpError(f"{doubled[0]} is named twice")
    rows = [row for name in names for row in _table_1(results, name)]
    least = {name: _least(results, name) for name in names}
    table = Table(1, load_paper("ecospec").table(1).title + ", by target", COLUMNS, [*rows, *_theirs()])
    table.views += [*_views(rows), _saved(rows, least)]
    table.notes += [*NOTES, f"Put together by: {provenance_text([collect_provenance(seed=0)])}."]
    folder = results / FOLDER if out is None else out
    shown = [row for row in rows if _main(row)]
    height = 1.0 + 0.3 * len(_bars_of(shown))
    plot = Plot("targets", "What marginal cost saves, by target", COLUMNS, shown, _draw, height, [NOTES[-1]])
    return [*write_table(folder, table), *write_plot(folder, plot)]


def _table_1(results: Path, name: str) -> list[Row]:
    """Our rows of a recipe's Table 1."""
    path = results / name / "ecospec" / "table_1.csv"
    found = [row for row in read_rows(path) if row.get("tag") != PAPER]
    if not found:
        valid = f"run: moexp bench --paper ecospec --table 1 --recipe {name}"
        raise MoexpError("no EcoSpec Table 1 of ours", where=str(path), valid=valid)
    missing = [column for column in COLUMNS if column not in found[0]]
    if missing:
        raise MoexpError(f"no column {missing[0]!r}", where=str(path), valid=", ".join(COLUMNS))
    return [_row(row, path) for row in found]


def _row(cells: dict[str, str], path: Path) -> Row:
    try:
        return {name: (float(cell) if name in NUMBERS else cell) if (cell := cells[name]) else None for name in COLUMNS}
    except ValueError as error:
        raise MoexpError(f"not a number: {error}", where=str(path)) from error


def _least(results: Path, name: str) -> dict[tuple[str, str], float]:
    """The lowest E that the trees allow, by platform and drafter; empty where Table 10 was not made."""
    rows = read_rows(results / name / "ecospec" / "table_10.csv")
    cheapest = [row for row in rows if row.get("predictor") == CHEAPEST and row.get("experts_per_layer")]
    return {(row["platform"], parts_of(row["method"])[0]): float(row["experts_per_layer"]) for row in cheapest}


def _theirs() -> list[Row]:
    """The paper's own Table 1."""
    return [
        {TABLE_1_NAMES.get(name, name): value for name, value in row.items()} | {"tag": PAPER}
        for row in load_paper("ecospec").table(1).rows
    ]


def _views(rows: Sequence[Row]) -> list[View]:
    """Averages over the workloads, a view for each place of the experts and temperature."""
    views = []
    header = ["model", "method", *(name for value in VALUES for name in (value, "paper")), "uniform"]
    average = [row for row in rows if row["workload"] == AVERAGE and row["method"] != AR]
    for platform, tag, temperature in dict.fromkeys(
        (row["platform"], row["tag"], row["temperature"]) for row in average
    ):
        mine = [row for row in average if (row["platform"], row["temperature"]) == (platform, temperature)]
        lines = [
            [
                str(row["model"]), str(row["method"]),
                *(text(row[name]) for value in VALUES for name in (value, f"paper_{value}")), text(row["uniform"]),
            ]
            for row in mine
        ]  # fmt: skip
        views.append(View(f"{platform} ({tag}), T = {number(temperature):g}, all workloads", header, lines))
    return views


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Averages by confidence and by marginal cost, of the same drafter in the same run."""
    average = {
        (row["model"], row["platform"], row["temperature"], str(row["method"])): row
        for row in rows
        if row["workload"] == AVERAGE
    }
    pairs = []
    for (model, platform, temperature, method), row in average.items():
        chosen = average.get((model, platform, temperature, method_name(method, ECOSPEC)))
        if chosen is not None:
            pairs.append((row, chosen))
    return pairs


def _saved(rows: Sequence[Row], least: dict[str, dict[tuple[str, str], float]]) -> View:
    """E saved and acceptance length lost, in percent, ours beside the paper's."""
    lines = []
    for row, chosen in _pairs(rows):
        bound = least[str(row["model"])].get((str(row["platform"]), str(row["method"])))
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


def _main(row: Row) -> bool:
    """Whether a row is in the figure: greedy, experts in memory, all workloads."""
    return (row["platform"], row["temperature"], row["workload"]) == (MEMORY, 0.0, AVERAGE) and row["method"] != AR


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
    for place, (_, row, chosen, prefix) in enumerate(bars):
        for shift, one, color, label in ((-0.2, row, ORANGE, "confidence"), (0.2, chosen, BLUE, "marginal cost")):
            value = number(one[f"{prefix}{name}"])
            axes.barh(
                place + shift, value, 0.36, color="white" if prefix else color, edgecolor=color, linewidth=0.8,
                label=label if place == 0 else None,
            )  # fmt: skip
            axes.text(value, place + shift, f" {value:.2f}", va="center", fontsize=6)
    axes.set_title(title)
    axes.margins(x=0.15)  # for the values beside the bars
    axes.grid(axis="x")
