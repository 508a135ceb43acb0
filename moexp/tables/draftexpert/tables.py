"""DraftExpert's tables 2 to 6 from the raw records of a run folder, beside the paper's own figures. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moexp.papers import Paper, load_paper
from moexp.tables.core.table import Table
from moexp.tables.draftexpert.data import Run, load_run
from moexp.tables.draftexpert.quality import table_3, table_5, table_6
from moexp.tables.draftexpert.speed import table_2, table_4

TABLES: dict[int, Callable[[Run, Paper], Table]] = {2: table_2, 3: table_3, 4: table_4, 5: table_5, 6: table_6}


def build_tables(folder: Path, samples: int = 2000) -> list[Table]:
    """Tables 2 to 6 of what a run folder holds, the paper's rows always among them."""
    run, paper = load_run(folder, samples), load_paper("draftexpert")
    return [make(run, paper) for make in TABLES.values()]
