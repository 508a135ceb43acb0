"""EcoSpec's tables and figures by name, made from a run folder beside the paper's own. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moexp.tables.core.plot import FigureSpec, Plot, make_plots
from moexp.tables.core.table import Table
from moexp.tables.ecospec.data import EcoRun, load_eco_runs
from moexp.tables.ecospec.figure_1 import figure_1
from moexp.tables.ecospec.figure_4 import figure_4
from moexp.tables.ecospec.figure_gamma import figure_gamma
from moexp.tables.ecospec.parts import merged
from moexp.tables.ecospec.tables_1_and_13 import table_1, table_13
from moexp.tables.ecospec.tables_2_and_3 import table_2, table_3
from moexp.tables.ecospec.tables_4_9_10 import table_4, table_9, table_10
from moexp.tables.ecospec.tables_5_11_12 import table_5, table_11, table_12
from moexp.tables.ecospec.tables_6_7_8 import table_6, table_7, table_8

TABLES: dict[int, Callable[[EcoRun], Table]] = {
    1: table_1, 2: table_2, 3: table_3, 4: table_4, 5: table_5, 6: table_6, 7: table_7, 8: table_8, 9: table_9,
    10: table_10, 11: table_11, 12: table_12, 13: table_13,
}  # fmt: skip

FIGURES: dict[str, FigureSpec[list[EcoRun]]] = {
    "1": FigureSpec(figure_1, (2,)),
    "4": FigureSpec(figure_4, ()),
    "gamma": FigureSpec(figure_gamma, (11,)),
}


def build_tables(folder: Path, samples: int = 2000) -> list[Table]:
    """The tables of what a run folder holds on all platforms, the paper's rows always among them."""
    runs = load_eco_runs(folder, samples)
    return [merged([(run.platform, make(run)) for run in runs]) for make in TABLES.values()]


def build_plots(folder: Path, trace: Path | None, samples: int = 2000, only: str | None = None) -> list[Plot]:
    """The figures (the one named `only`, or all) that a run folder and a trace allow."""
    return make_plots(FIGURES, load_eco_runs(folder, samples), trace, only)
