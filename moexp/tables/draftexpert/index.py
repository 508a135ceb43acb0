"""DraftExpert's tables and figures by name, made from a run folder beside the paper's own. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moexp.tables.core.plot import FigureSpec, Plot, make_plots
from moexp.tables.core.table import Table
from moexp.tables.draftexpert.data import Run, load_run
from moexp.tables.draftexpert.figure_1 import figure_1
from moexp.tables.draftexpert.figure_2 import figure_2
from moexp.tables.draftexpert.figure_3 import figure_3
from moexp.tables.draftexpert.figure_4 import figure_4
from moexp.tables.draftexpert.figure_5 import figure_5
from moexp.tables.draftexpert.figure_acceptance import figure_acceptance
from moexp.tables.draftexpert.figure_speedup import figure_speedup
from moexp.tables.draftexpert.table_2 import table_2
from moexp.tables.draftexpert.table_3 import table_3
from moexp.tables.draftexpert.table_4 import table_4
from moexp.tables.draftexpert.table_5 import table_5
from moexp.tables.draftexpert.table_6 import table_6

TABLES: dict[int, Callable[[Run], Table]] = {2: table_2, 3: table_3, 4: table_4, 5: table_5, 6: table_6}

FIGURES: dict[str, FigureSpec[Run]] = {
    "1": FigureSpec(figure_1, (2,)),
    "2": FigureSpec(figure_2, (3,)),
    "3": FigureSpec(figure_3, (3,)),
    "4": FigureSpec(figure_4, (3,)),
    "5": FigureSpec(figure_5, ()),
    "speedup": FigureSpec(figure_speedup, (2,)),
    "acceptance": FigureSpec(figure_acceptance, (2,)),
}


def build_tables(folder: Path, samples: int = 2000) -> list[Table]:
    """Tables 2 to 6 of what a run folder holds, the paper's rows always among them."""
    run = load_run(folder, samples)
    return [make(run) for make in TABLES.values()]


def build_plots(folder: Path, trace: Path | None, samples: int = 2000, only: str | None = None) -> list[Plot]:
    """The figures (the one named `only`, or all) that a run folder and a trace allow."""
    return make_plots(FIGURES, load_run(folder, samples), trace, only)
