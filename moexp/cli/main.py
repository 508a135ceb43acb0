"""The console script: every command, registered."""

from __future__ import annotations

from moexp.base import ranks
from moexp.cli import decoding, measuring, reporting, simulating, training  # noqa: F401 (they register their commands)
from moexp.cli.app import app


def main() -> None:
    """Runs the command that the arguments name, and ends the process as all ranks agree."""
    try:
        app()
    except SystemExit as end:
        ranks.leave(end.code)
        raise
