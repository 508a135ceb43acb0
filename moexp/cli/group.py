"""How a command ends: mistakes and interruptions in one line, under a launcher in one line for all processes."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from typing import Any

import typer
from typer.core import TyperGroup

from moexp.base import ranks
from moexp.base.errors import MoexpError

USER_ERROR = 2
LOST = 1
INTERRUPTED = 130  # what a shell reports for SIGINT

PARALLEL = ("train-draft-expert", "train-drafter", "train-predictor", "trace-routing")
"""Commands that several processes can share."""


class CommandGroup(TyperGroup):
    """Ends every command's mistakes and interruptions in one line instead of a traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, chosen, rest = super().resolve_command(ctx, args)
        if ranks.world() > 1 and name not in PARALLEL:
            raise MoexpError(f"{name} runs in one process", where="torchrun", valid=", ".join(PARALLEL))
        return name, chosen, rest

    def invoke(self, ctx: Any) -> Any:
        with ranks.joined() as run:
            try:
                with run.silenced():
                    return super().invoke(ctx)
            except MoexpError as error:
                line = " ".join(str(error).split())
                _last_words(run, f"moexp: error: {line}")
                raise typer.Exit(USER_ERROR) from error
            except ranks.PeerLost as error:
                _last_words(run, f"moexp: error: another process of this run ended. {_to_resume()}")
                raise typer.Exit(LOST) from error
            except KeyboardInterrupt as error:
                _last_words(run, f"\ninterrupted; finished work is kept. {_to_resume()}")
                raise typer.Exit(INTERRUPTED) from error
            except Exception:
                if ranks.world() > 1 and not run.speaks():  # one traceback says it
                    raise typer.Exit(LOST) from None
                raise


def _last_words(run: ranks.Run, line: str) -> None:
    if ranks.world() > 1 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher passes on the Ctrl-C that we got too
    if run.speaks():
        typer.echo(line, err=True)


def _to_resume() -> str:
    start = (
        ["moexp"] if ranks.world() == 1 else ["torchrun", "--nproc-per-node", str(ranks.local_world()), "-m", "moexp"]
    )
    return f"To resume, run again: {shlex.join([*start, *sys.argv[1:]])}"
