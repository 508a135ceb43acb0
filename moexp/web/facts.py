"""What was run: recipe, target, platforms, hardware, commits, seeds. Pure, from records; a line is Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from moexp.config.recipe import Recipe
from moexp.papers import load_paper
from moexp.tables.core.provenance import commit_text, distinct, hardware_text, versions_text
from moexp.web.markup import code, plain
from moexp.web.sources import PAPER_NAMES, Source

UNKNOWN = "not recorded"


def facts(recipe: Recipe, sources: Sequence[Source], target: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each fact, in order.

    Args:
        target: geometry, as a run folder has it; empty where nothing was measured.
    """
    runs = [run for source in sources for run in source.measured.provenance]
    days = sorted({str(run["started"]) for run in runs if run.get("started")})
    threads = _listed(source.measured.settings.get("threads") for source in sources)
    hardware = _listed(hardware_text(run["hardware"]) for run in runs if run.get("hardware"))
    return [
        ("Recipe", f"{code(recipe.name)}: {plain(recipe.summary) or 'no summary'}"),
        ("Target", _geometry(recipe, target)),
        *((PAPER_NAMES[paper], _paper(paper, sources)) for paper in dict.fromkeys(s.paper for s in sources)),
        ("Hardware", plain(hardware) + ("" if threads == UNKNOWN else f", {threads} threads")),
        ("Commit", plain(_listed(map(commit_text, runs)))),
        ("Seed", plain(_listed(run.get("seed") for run in runs))),
        ("Command", ", ".join(map(code, dict.fromkeys(str(run.get("command")) for run in runs))) or UNKNOWN),
        ("Versions", plain(_listed(versions_text(run) or None for run in runs))),
        ("Measured", " to ".join(dict.fromkeys((days[0], days[-1]))) if days else UNKNOWN),
    ]


_listed = partial(distinct, separator="; ", missing=UNKNOWN)


def _paper(paper: str, sources: Iterable[Source]) -> str:
    of_paper = [source for source in sources if source.paper == paper]
    platforms = ", ".join(dict.fromkeys(f"{plain(s.platform)} ({plain(s.measured.tag)})" for s in of_paper))
    requests = sum(len(arms) for source in of_paper for arms in source.measured.arms.values())
    methods = {method for source in of_paper for method in source.measured.arms}
    return f"arXiv {load_paper(paper).arxiv}; {platforms}; {requests:,} requests by {len(methods)} methods"


def _geometry(recipe: Recipe, target: dict[str, Any]) -> str:
    name = plain(str(target.get("name") or recipe.name))
    if not target:
        return f"{name}, {recipe.target.kind}"
    layers, experts, top_k = (target.get(key) for key in ("moe_layers", "num_experts", "top_k"))
    return f"{name}, {recipe.target.kind}: {layers} MoE layers, {experts} routed experts a layer, top-{top_k}"
