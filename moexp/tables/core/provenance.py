"""Where numbers come from, in words: command, commit, hardware, seed and versions of the runs that gave them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moexp.tables.core.run import Measured, invocations, read_json

TRACE_MANIFEST = "manifest.json"
"""File of a routing trace's folder that holds its provenance."""


def provenance_lines(sources: Sequence[Measured]) -> list[str]:
    """Where a table's runs come from: command, commit, date, hardware, threads, seed, versions, and expert widths.

    Runs that differ only in when they began share a line.
    """
    groups: dict[str, list[Measured]] = {}
    for source in sources:
        line = provenance_text(source.provenance, threads=source.settings.get("threads", "unknown"))
        groups.setdefault(line, []).append(source)
    lines = []
    for line, members in groups.items():
        names = [
            member.name + (f" (experts {width} wide)" if (width := member.settings.get("expert_width")) else "")
            for member in members
        ]
        days = sorted({run["started"] for member in members for run in member.provenance})
        when = f"; {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
        lines.append(f"Provenance of {', '.join(names)}: {line}{when}.")
    return lines


def run_source(folder: Path) -> str:
    """Where a run folder comes from, in a line."""
    return f"Provenance of the run: {provenance_text(invocations(folder))}."


def trace_source(trace: Path) -> str:
    """Where a routing trace comes from, in a line."""
    provenance = (read_json(trace / TRACE_MANIFEST) or {}).get("provenance")
    return f"Provenance of the routing trace: {provenance_text([provenance] if provenance else [])}."


def provenance_text(runs: Sequence[dict[str, Any]], *, threads: Any = None) -> str:
    """One line without dates; several invocations (a resumed run) show every command and commit once."""
    if not runs:
        return "not recorded"
    parts = [
        f"command `{distinct(run.get('command') for run in runs)}`",
        f"commit {distinct(map(commit_text, runs))}",
        hardware_text(runs[-1].get("hardware", {})),
        *([] if threads is None else [f"compute threads {threads}"]),
        f"seed {distinct(run.get('seed') for run in runs)}",
        versions_text(runs[-1]),
    ]
    return "; ".join(parts)


def distinct(values: Iterable[Any], separator: str = ", ", missing: str = "unknown") -> str:
    """The different values in order, without None; `missing` where none is left."""
    return separator.join(dict.fromkeys(str(value) for value in values if value is not None)) or missing


def commit_text(run: dict[str, Any]) -> str | None:
    """The first digits of an invocation's commit; None where it is not known."""
    git = run.get("git") or {}
    return None if git.get("commit") is None else str(git["commit"])[:12] + (" (dirty)" if git.get("dirty") else "")


def hardware_text(hardware: dict[str, Any]) -> str:
    """CPU, cores, memory and GPUs."""
    parts = [hardware.get("cpu") or "unknown CPU", f"{hardware.get('cores')} cores"]
    if hardware.get("memory_gib"):
        parts.append(f"{hardware['memory_gib']} GiB")
    return ", ".join([*parts, *map(str, hardware.get("gpus") or ())])


def versions_text(run: dict[str, Any]) -> str:
    """The versions that an invocation recorded."""
    return ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items() if version)
