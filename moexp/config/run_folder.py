"""Folders of artifacts and runs: who made them, with what, and which stages are done."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.base.provenance import collect_provenance
from moexp.config.recipe import Recipe

REMEDY = "remove it to start over"


class RunDir:
    """A run folder, held by one process at a time.

    Opening it makes the folder, takes its lock, writes `recipe.yaml` (resolved) and adds this invocation to
    `provenance.json`, so that a resumed run names every command that had a part in it.

    Raises:
        MoexpError: another process holds the folder, or it cannot be written.
    """

    def __init__(self, path: Path, recipe: Recipe, argv: Sequence[str] | None = None) -> None:
        self.path = Path(path)
        self.recipe = recipe
        self._argv = argv
        self._lock = ExitStack()

    def __enter__(self) -> RunDir:
        if self.path.exists() and not self.path.is_dir():
            raise MoexpError("a file stands where the run folder should be", where=str(self.path))
        with ExitStack() as lock:
            with atomic.writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(self.path))
            atomic.remove_leftovers(self.path)
            atomic.write_text(self.path / "recipe.yaml", self.recipe.resolved_yaml())
            invocation = collect_provenance(self.recipe.seed, self._argv)
            provenance = self.path / "provenance.json"
            earlier = atomic.read_json(provenance, valid=REMEDY)["invocations"] if provenance.exists() else []
            atomic.write_json(provenance, {"invocations": [*earlier, invocation]})
            self._lock = lock.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def result(self, stage: str, digest: str) -> dict[str, Any] | None:
        """The result that `mark_done` saved of a stage; None if not done, or done with another digest."""
        marker = self._marker(stage)
        if not marker.exists():
            return None
        saved = atomic.read_json(marker, valid=REMEDY)
        return saved["result"] if saved.get("digest") == digest else None

    def mark_done(self, stage: str, digest: str, result: dict[str, Any] | None = None) -> None:
        """Records that a stage is finished. Call it last, once everything that the stage wrote is on disk."""
        atomic.write_json(self._marker(stage), {"stage": stage, "digest": digest, "result": result or {}})

    def _marker(self, stage: str) -> Path:
        return self.path / f"{stage}.done.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder against other processes; the file `.lock` stays in it.

    Raises:
        MoexpError: another process holds it.
    """
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            what = f"another moexp run (process {holder}) is using this folder"
            raise MoexpError(what, where=str(folder), valid="wait for it, or choose another --out") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)  # closing gives the lock up; so does dying
