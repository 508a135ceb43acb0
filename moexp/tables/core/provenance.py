"""Where measured numbers come from, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moexp.tables.core.run import Measured


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


def provenance_text(runs: Sequence[dict[str, Any]], *, threads: Any = None) -> str:
    """One line without dates; several invocations (a resumed run) show every command and commit once."""
    if not runs:
        return "not recorded"

    def once(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "unknown"

    def commit(run: dict[str, Any]) -> str | None:
        git = run.get("git") or {}
        return None if git.get("commit") is None else git["commit"][:12] + (" (dirty)" if git.get("dirty") else "")

    hardware, versions = runs[-1].get("hardware", {}), runs[-1].get("versions", {})
    memory = hardware.get("memory_gib")
    parts = [
        f"command `{once(run.get('command') for run in runs)}`",
        f"commit {once(map(commit, runs))}",
        f"{hardware.get('cpu') or 'unknown CPU'}, {hardware.get('cores')} cores"
        + (f", {memory} GiB" if memory else "")
        + "".join(f", {gpu}" for gpu in hardware.get("gpus") or ()),
        *([] if threads is None else [f"compute threads {threads}"]),
        f"seed {once(run.get('seed') for run in runs)}",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    ]
    return "; ".join(parts)
