"""A recipe's tables and figures, written from its raw records; nothing is run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from moexp.base.errors import MoexpError
from moexp.config.locations import run_folder
from moexp.papers import load_paper
from moexp.tables.core.table import write_table


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
    from moexp.config.locations import trace_folder
    from moexp.tables.figures import draw_figures

    tables = write_tables(recipe, paper, folder, results, numbers) if figure is None else []
    return tables + draw_figures(recipe, paper, folder, trace_folder(recipe), results, figure)


def write_tables(
    recipe: Any, paper: str, folder: Path, results: Path, numbers: Collection[int] | None = None
) -> list[Path]:
    """Writes the tables `numbers` (all if None) of a run folder's records to `results/<recipe>/<paper>`."""
    from moexp.tables.draftexpert import tables as draftexpert_tables
    from moexp.tables.ecospec import tables as ecospec_tables

    make = {"draftexpert": draftexpert_tables.build_tables, "ecospec": ecospec_tables.build_tables}[paper]
    tables = make(folder, samples=recipe.bench.bootstrap_samples)
    wanted = [table for table in tables if numbers is None or table.number in numbers]
    return [path for table in wanted for path in write_table(results / recipe.name / paper, table)]
