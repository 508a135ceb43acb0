"""The console script: every command, registered."""

from __future__ import annotations

from moexp.base import ranks
from moexp.cli import commands_decode, commands_report, commands_simulate, commands_train  # noqa: F401 (they register)
from moexp.cli.app import app


def main() -> None:
    """Runs the command that the arguments name, and ends the process as all ranks agree."""
    try:
        app()
    except SystemExit as end:
        ranks.leave(end.code)
        raise
