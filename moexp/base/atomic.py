"""Files and folders that are either complete or absent: write beside the target, fsync, rename.

A kill at any point leaves the old content; a full disk is a MoexpError and leaves nothing half-written.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from moexp.base.errors import MoexpError

_TEMP_PREFIX = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (
    errno.EACCES,
    errno.EEXIST,  # a file where a parent folder should be
    errno.EIO,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces the file at `path` by `data`; parents are created. MoexpError where the disk refuses."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = _temp_beside(path)
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temp, path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` by `text` in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replaces the file at `path` by indented JSON. A NaN is a ValueError: a missing number is null."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, *, valid: str = "") -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        valid: of the error: what can be done.

    Raises:
        MoexpError: unreadable, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoexpError(f"not readable as JSON: {error}", where=str(path), valid=valid) from error
    if not isinstance(value, dict):
        raise MoexpError("not a JSON object", where=str(path), valid=valid)
    return value


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that replaces it at once when the block ends without an error.

    A folder that is there already is replaced. POSIX cannot swap two folders in one step, so the old one is
    first moved to `.NAME.old`; if the process dies between the two renames, the next `new_folder` (or
    `recover_folder`) puts it back.
    """
    with writing(path):
        if path.exists() and not path.is_dir():
            raise MoexpError("a file stands where a folder should be", where=str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        recover_folder(path)
        temp = _temp_beside(path)
        temp.mkdir()
        try:
            yield temp
            _sync_tree(temp)
            if path.exists():
                os.rename(path, _aside(path))
            os.rename(temp, path)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            recover_folder(path)
            raise
        _sync_folder(path.parent)
        shutil.rmtree(_aside(path), ignore_errors=True)


def publish_folder(work: Path, path: Path) -> None:
    """Gives a finished folder its name, once all that it holds is on disk. At `path` is nothing, or an empty folder."""
    with writing(path):
        _sync_tree(work)
        os.rename(work, path)
        _sync_folder(path.parent)


def recover_folder(path: Path) -> None:
    """Finishes an interrupted replacement of the folder at `path`: exactly one of old and new is left."""
    aside = _aside(path)
    if not aside.exists():
        return
    if path.exists():
        shutil.rmtree(aside)
    else:
        os.rename(aside, path)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of killed writers in `folder`. The caller must be the folder's only writer."""
    for left in folder.glob(_TEMP_PREFIX + "*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk, and a path that may not be written, into a MoexpError; other errors pass.

    Libraries that write for us wrap the error (safetensors, Arrow), so the message is looked at too.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL or _says_full(error):
            raise _disk_full(path) from error
        if error.errno in _REFUSED:
            raise MoexpError(str(error.strerror), where=str(error.filename or path)) from error
        raise
    except MoexpError:
        raise
    except Exception as error:
        if _says_full(error):
            raise _disk_full(path) from error
        raise


def write_all(fd: int, data: bytes) -> None:
    """Writes all of `data`: one `os.write` may take less."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _disk_full(path: Path) -> MoexpError:
    return MoexpError(
        "disk full, nothing was changed",
        where=str(path),
        valid="free some space, or point MOEXP_HOME or --out at another disk",
    )


def _says_full(error: Exception) -> bool:
    return "No space left on device" in str(error)


def _temp_beside(path: Path) -> Path:
    return path.with_name(f"{_TEMP_PREFIX}{path.name}-{uuid4().hex[:8]}")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path):
        for name in files:
            _sync_file(Path(folder, name))
        _sync_folder(Path(folder))


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_sync_folder = _sync_file  # a rename is durable only once its folder is; opening a folder works the same
