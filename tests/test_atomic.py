from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moexp.base import atomic
from moexp.base.errors import MoexpError


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def fill_disk_after(monkeypatch: pytest.MonkeyPatch, left: int, code: int = errno.ENOSPC) -> None:
    """Makes `os.write` behave as on a disk with `left` bytes free: short writes first, then the error."""
    real_write = os.write
    free = [left]

    def write(fd: int, data: bytes) -> int:
        if not free[0]:
            raise OSError(code, os.strerror(code))
        count = real_write(fd, bytes(data[: free[0]]))
        free[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)


def test_a_file_is_written_with_its_parents_and_replaced(tmp_path: Path):
    path = tmp_path / "deep" / "file.json"
    atomic.write_json(path, {"a": None})
    atomic.write_text(path, "é")
    assert path.read_text(encoding="utf-8") == "é"
    assert contents(tmp_path) == {"deep/file.json": "é".encode()}


def test_the_files_mode_follows_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        atomic.write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_half_written(code: int, tmp_path: Path, monkeypatch):
    path = tmp_path / "file"
    atomic.write_text(path, "old")
    fill_disk_after(monkeypatch, 5, code)
    with pytest.raises(MoexpError, match="disk full.*file"):
        atomic.write_text(path, "new and longer")
    assert contents(tmp_path) == {"file": b"old"}


def test_a_disk_that_is_full_only_when_synced_counts_too(tmp_path: Path, monkeypatch):
    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(MoexpError, match="disk full"):
        atomic.write_text(tmp_path / "file", "text")
    assert contents(tmp_path) == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_the_systems_own_full_device_is_recognised():
    with pytest.raises(MoexpError, match="disk full"), atomic.writing(Path("/dev/full")):
        fd = os.open("/dev/full", os.O_WRONLY)
        try:
            atomic.write_all(fd, b"text")
        finally:
            os.close(fd)


def test_a_library_that_wraps_the_error_is_recognised():
    with pytest.raises(MoexpError, match="disk full"), atomic.writing(Path("x")):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="something else"), atomic.writing(Path("x")):
        raise RuntimeError("something else")


def test_a_place_that_is_no_folder_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(MoexpError, match="file"):
        atomic.write_text(tmp_path / "file" / "below", "text")
    with pytest.raises(MoexpError, match="a file stands"), atomic.new_folder(tmp_path / "file"):
        pass
    assert contents(tmp_path) == {"file": b"text"}


def test_json_has_no_nan(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        atomic.write_json(tmp_path / "file", float("nan"))
    assert contents(tmp_path) == {}


KILLED = """
import os, signal, sys
from pathlib import Path
from moexp.base import atomic

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
{setup}
"""


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_kill_while_writing_leaves_the_old_file(call: str, tmp_path: Path):
    path = tmp_path / "file"
    atomic.write_text(path, "old")
    setup = f"os.{call} = die\natomic.write_text(folder / 'file', 'new')"
    done = subprocess.run([sys.executable, "-c", KILLED.format(setup=setup), str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    atomic.remove_leftovers(tmp_path)
    assert contents(tmp_path) == {"file": b"old"}


# --- folders ---


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path):
    target = tmp_path / "folder"
    for name in ("one", "two"):
        with atomic.new_folder(target) as temp:
            (temp / "sub").mkdir()
            (temp / "sub" / name).write_text(name)
            assert not (target / "sub" / name).exists()
    assert contents(tmp_path) == {"folder/sub/two": b"two"}


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt()])
def test_a_folder_whose_making_fails_is_not_there(error: BaseException, tmp_path: Path):
    target = tmp_path / "folder"
    with atomic.new_folder(target) as temp:
        (temp / "file").write_text("old")
    with pytest.raises(type(error)), atomic.new_folder(target) as temp:
        (temp / "file").write_text("new")
        raise error
    assert contents(tmp_path) == {"folder/file": b"old"}


def test_an_error_that_has_nothing_to_do_with_writing_passes_through(tmp_path: Path):
    with pytest.raises(FileNotFoundError), atomic.new_folder(tmp_path / "folder"):
        (tmp_path / "input").read_text()


@pytest.mark.parametrize("rename_that_fails", [1, 2])
def test_a_failing_rename_leaves_the_old_folder(rename_that_fails: int, tmp_path: Path, monkeypatch):
    target = tmp_path / "folder"
    with atomic.new_folder(target) as temp:
        (temp / "file").write_text("old")
    real_rename, calls = os.rename, []

    def rename(source: Path, to: Path) -> None:
        calls.append(source)
        if len(calls) == rename_that_fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_rename(source, to)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(MoexpError, match="disk full"), atomic.new_folder(target) as temp:
        (temp / "file").write_text("new")
    assert contents(tmp_path) == {"folder/file": b"old"}


@pytest.mark.parametrize("rename_that_dies", [1, 2])
def test_a_kill_between_the_renames_is_mended_by_the_next_writer(rename_that_dies: int, tmp_path: Path):
    target = tmp_path / "folder"
    with atomic.new_folder(target) as temp:
        (temp / "file").write_text("old")
    setup = f"""
real, calls = os.rename, []
def rename(*args):
    calls.append(args)
    die() if len(calls) == {rename_that_dies} else real(*args)
os.rename = rename
with atomic.new_folder(folder / 'folder') as temp:
    (temp / 'file').write_text('new')
"""
    done = subprocess.run([sys.executable, "-c", KILLED.format(setup=setup), str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    atomic.recover_folder(target)
    atomic.remove_leftovers(tmp_path)
    assert contents(tmp_path) == {"folder/file": b"old"}
