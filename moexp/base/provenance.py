"""Where a number comes from: command, commit, versions, hardware. Imports no torch."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import moexp

_CODE = ("moexp", "recipes", "pyproject.toml")
_PACKAGES = ("torch", "transformers", "datasets", "safetensors", "numpy")


def collect_provenance(seed: int, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What is needed to repeat and to judge a run, as plain JSON; what is unknown is None."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return {
        "command": shlex.join(["moexp", *arguments]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "git": git_state(Path(moexp.__file__).parent.parent),
        "versions": versions(),
        "hardware": hardware(),
    }


def git_state(checkout: Path) -> dict[str, Any]:
    """{commit, dirty} of the clone that the code runs from, both None where it runs from elsewhere.

    `dirty` speaks of code and recipes only: results that a run writes into its own clone do not count.
    """
    nothing: dict[str, Any] = {"commit": None, "dirty": None}
    top = _output("git", "-C", str(checkout), "rev-parse", "--show-toplevel")
    # An installed package may lie inside somebody else's repository; that commit would say nothing about us.
    if top is None or Path(top).resolve() != checkout.resolve() or not (checkout / "pyproject.toml").is_file():
        return nothing
    commit = _output("git", "-C", str(checkout), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(checkout), "status", "--porcelain", "--", *_CODE)
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of what computes for it."""
    known: dict[str, str | None] = {"python": platform.python_version(), "moexp": moexp.__version__}
    for package in _PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = None
    return known


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, memory (GiB), GPUs (name and memory, as nvidia-smi says)."""
    try:
        cores: int | None = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count()
    try:
        memory_gib: float | None = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError):
        memory_gib = None
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": memory_gib,
        "gpus": _gpus(),
    }


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def _output(*command: str) -> str | None:
    """Standard output of a command, None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
