"""What was run: recipe, target, platforms, hardware, commits, seeds. Pure, from records; a line is Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moexp.config.recipe import Recipe
from moexp.papers import load_paper
from moexp.web.sources import PAPER_NAMES, Source

UNKNOWN = "not recorded"


def facts(recipe: Recipe, sources: Sequence[Source], target: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each fact, in order.

    Args:
        target: geometry, as a run folder keeps it; empty where nothing was measured.
    """
    runs = [run for source in sources for run in source.measured.provenance]
    hardware = [run.get("hardware") or {} for run in runs]
    days = sorted({str(run["started"]) for run in runs if run.get("started")})
    threads = _once(source.measured.settings.get("threads") for source in sources)
    found = [
        ("Recipe", f"{code(recipe.name)}: {plain(recipe.summary) or 'no summary'}"),
        ("Target", _geometry(recipe, target)),
        *((PAPER_NAMES[paper], _paper(paper, sources)) for paper in dict.fromkeys(s.paper for s in sources)),
        ("Hardware", plain(_once(map(_machine, hardware))) + ("" if threads == UNKNOWN else f", {threads} threads")),
        ("Commit", plain(_once(map(_commit, runs)))),
        ("Seed", plain(_once(run.get("seed") for run in runs))),
        ("Command", ", ".join(map(code, dict.fromkeys(str(run.get("command")) for run in runs))) or UNKNOWN),
        ("Versions", plain(_once(map(_versions, runs)))),
        ("Measured", " to ".join(dict.fromkeys((days[0], days[-1]))) if days else UNKNOWN),
    ]
    return found


def plain(text: str) -> str:
    """Text whose characters have no meaning in Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#&~" else c for c in " ".join(text.split()))


def code(text: str) -> str:
    """Text as Markdown code; a backtick in it would end it."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def _paper(paper: str, sources: Sequence[Source]) -> str:
    mine = [source for source in sources if source.paper == paper]
    places = ", ".join(dict.fromkeys(f"{plain(s.platform)} ({plain(s.measured.tag)})" for s in mine))
    requests = sum(len(arms) for source in mine for arms in source.measured.arms.values())
    methods = {method for source in mine for method in source.measured.arms}
    return f"arXiv {load_paper(paper).arxiv}; {places}; {requests:,} requests by {len(methods)} methods"


def _geometry(recipe: Recipe, target: dict[str, Any]) -> str:
    name = plain(str(target.get("name") or recipe.name))
    if not target:
        return f"{name}, {recipe.target.kind}"
    layers, experts, top_k = (target.get(key) for key in ("moe_layers", "num_experts", "top_k"))
    return f"{name}, {recipe.target.kind}: {layers} MoE layers, {experts} routed experts a layer, top-{top_k}"


def _machine(hardware: dict[str, Any]) -> str | None:
    if not hardware:
        return None
    parts = [f"{hardware.get('cpu') or 'unknown CPU'}", f"{hardware.get('cores')} cores"]
    if hardware.get("memory_gib"):
        parts.append(f"{hardware['memory_gib']} GiB")
    return ", ".join([*parts, *map(str, hardware.get("gpus") or ())])


def _commit(run: dict[str, Any]) -> str | None:
    git = run.get("git") or {}
    return None if git.get("commit") is None else str(git["commit"])[:12] + (" (dirty)" if git.get("dirty") else "")


def _versions(run: dict[str, Any]) -> str | None:
    known = {name: version for name, version in (run.get("versions") or {}).items() if version}
    return ", ".join(f"{name} {version}" for name, version in known.items()) or None


def _once(values: Iterable[Any]) -> str:
    return "; ".join(dict.fromkeys(str(value) for value in values if value is not None)) or UNKNOWN
