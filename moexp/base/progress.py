"""Progress of long work: a bar with an ETA on a terminal, one line at the end of a stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[..., None]


@contextmanager
def stage(name: str, total: int | None) -> Iterator[Advance]:
    """Shows the progress of one stage on stderr. The block calls `advance(done, note="...")` with the absolute
    count done.
    """
    console = Console(stderr=True)
    started = time.monotonic()
    last_note = ""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=18),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total, note="")

        def advance(done: int, note: str = "") -> None:
            nonlocal last_note
            last_note = note or last_note
            progress.update(task, completed=done, note=last_note)

        yield advance
    took = time.monotonic() - started
    if took > 2 or not console.is_terminal:
        console.print(f"{name:<28} {took:7.1f} s  {last_note}", highlight=False, markup=False)


def note_of(metrics: dict[str, float], *names: str) -> str:
    """Those of the named metrics that there are, as a short note for a bar."""
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in names if name in metrics)
