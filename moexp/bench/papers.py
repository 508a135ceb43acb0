"""`moexp bench`: which tables there are of each paper, and the run that fills them, or a figure."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.config.locations import run_folder
from moexp.config.recipe import Recipe
from moexp.papers import load_paper
from moexp.tables.write import FIGURES, TABLES, check_figure, write_results


def run_bench(
    recipe: Recipe,
    tables: Collection[int] | None = None,
    *,
    figure: str | None = None,
    paper: str = "draftexpert",
    out: Path | None = None,
    results: Path = Path("results"),
) -> list[Path]:
    """Measures what `tables` need and is not measured yet, then writes the tables and what figures there are data for.

    Args:
        recipe: names target, draft experts, decoding and platforms.
        tables: numbers; None: all.
        figure: measure what it needs and write it alone, in place of tables.
        paper: whose tables.
        out: folder of the raw records, in place of one under $MOEXP_HOME.
        results: tables and figures go to `results/<recipe>/<paper>`.

    Returns:
        the files of these tables, and of the figures.

    Raises:
        MoexpError: an unknown paper, table, figure or platform, or an earlier stage is missing.
    """
    load_paper(paper)
    if figure is not None:
        check_figure(figure, paper)
        tables = FIGURES[paper][figure]
    numbers = TABLES[paper] if tables is None else tuple(tables)
    check_tables(numbers, paper)
    folder = run_folder(recipe, out, paper)
    if not numbers:
        pass  # nothing to measure: the figure is of the routing trace
    elif paper == "ecospec":
        from moexp.bench.ecospec import run_ecospec

        run_ecospec(recipe, numbers, folder)
    else:
        from moexp.bench.draftexpert import run_draftexpert

        run_draftexpert(recipe, numbers, folder)
    return write_results(recipe, paper, folder, results, numbers, figure)


def parse_request(table: str | None, figure: str | None, paper: str) -> tuple[tuple[int, ...] | None, str | None]:
    """What `--table` (a number, or `all`) and `--figure` name: tables, or one figure; by default all tables.

    Raises:
        MoexpError: both are given, or one names what is not measured here; an unknown paper.
    """
    load_paper(paper)
    if figure is not None:
        if table is not None:
            raise MoexpError("--table and --figure exclude each other", valid="one of the two")
        check_figure(figure, paper)
        return None, figure
    if table in (None, "all"):
        return TABLES[paper], None
    if not table.isdecimal():
        raise MoexpError(f"no table {table!r} to measure", where="--table", valid=_valid(paper))
    check_tables((int(table),), paper)
    return (int(table),), None


def check_tables(tables: Collection[int], paper: str, where: str = "--table") -> None:
    """MoexpError, naming the option `where` they stand, unless these tables are measured here."""
    for number in tables:
        if number not in TABLES[paper]:
            raise MoexpError(f"no table {number} to measure", where=where, valid=_valid(paper))


def _valid(paper: str) -> str:
    return ", ".join([*map(str, TABLES[paper]), "all"])
