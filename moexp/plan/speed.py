"""Expected speed on a platform, by formula: C microseconds of computing and L of loading make a one-token AR step.

Nothing is replayed here (`moexp simulate` does that): AR's loads do not depend on routing while nothing is kept, and
speculation takes a paper's acceptance, where one prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moexp import metrics
from moexp.audit import draftexpert, ecospec
from moexp.audit.lines import Line, only
from moexp.base.errors import MoexpError
from moexp.papers import load_paper
from moexp.sim.platforms.files import list_platforms, load_platform, machine_file
from moexp.sim.platforms.geometry import PUBLISHED_MODELS, ModelGeometry
from moexp.sim.platforms.platform import SimPlatform
from moexp.tables.core.tags import PAPER

ESTIMATED = "estimated"
DEFAULT = "cg"  # where no platform lists the model


@dataclass(frozen=True)
class Rate:
    """One expected speed.

    Attributes:
        what: of which method.
        tokens_per_s: of it; None: not known.
        speedup: over AR.
        how: the formula.
        tag: where its inputs are from.
    """

    what: str
    tokens_per_s: float | None
    speedup: float | None
    how: str
    tag: str = ESTIMATED


@dataclass(frozen=True)
class Speed:
    """What is expected on one platform.

    Attributes:
        expert_bytes, moved_bytes: of one expert on the link, and of all that AR loads for a token.
        compute_ms, load_ms: C and L; computing is None where it cannot be told.
        held: share of the routed pool that stays in the platform's slots.
        note: how far the platform's constants are from this model.
    """

    platform: SimPlatform
    expert_bytes: int
    moved_bytes: float
    compute_ms: float | None
    load_ms: float
    held: float
    rates: tuple[Rate, ...]
    note: str = ""


def speeds_of(geometry: ModelGeometry, name: str, moved_bytes: int, platform: str | None) -> list[Speed]:
    """Expected speeds.

    Args:
        geometry: of the target.
        name: of the recipe; a platform may have been calibrated for it.
        moved_bytes: of one expert as the recipe's store brings it in; a platform that lists the model has its own.
        platform: a name or a file; None: those that list the model, and this machine where it is calibrated.

    Raises:
        MoexpError: no such platform.
    """
    names: Sequence[str]
    if platform is not None:
        names = [platform]
    else:
        own = machine_file()
        names = [info.name for info in list_platforms() if geometry.name in info.models and info.path != own]
        names = [*(names or [DEFAULT]), *([str(own)] if own.is_file() else [])]
    return [_speed(geometry, name, moved_bytes, place) for place in names]


def _speed(geometry: ModelGeometry, name: str, moved_bytes: int, place: str) -> Speed:
    platform = _loaded(place, geometry.name, name)
    reference = PUBLISHED_MODELS.get(platform.model)
    listed = platform.model in (geometry.name, name)
    size = platform.expert_bytes(geometry) if listed else moved_bytes
    held = 0.0
    if platform.slots.policy != "none":
        room = (platform.slots.bytes or 0) / (geometry.layer_experts * size)
        held = min(1.0, platform.slots.fraction or room)
    moved = geometry.experts_per_token * (1 - held)
    load_us = platform.link.load_us(moved, size)
    computed, scale, note = geometry, 1.0, ""
    if not listed and reference is not None:
        computed, scale = reference, geometry.active_params / reference.active_params
        note = f"no constants for this model: C is that of {reference.name} by the weights a token uses, x {scale:.2f}"
    compute_us: float | None = None
    beside_us = 0.0
    if listed or reference is not None:
        step = platform.compute.costs(computed.dense_layers).step("ar", 1, False)
        compute_us = step.total_s(computed.moe_layers, computed.top_k) * 1e6 * scale
        beside_us = step.beside_s(computed.moe_layers, computed.top_k) * 1e6 * scale
    else:
        note = f"calibrated for {platform.model}: its link counts here, computing is not known"
    rates = tuple(_rates(geometry, platform, compute_us, beside_us, load_us, listed))
    compute_ms = None if compute_us is None else compute_us / 1e3
    return Speed(platform, size, moved * size, compute_ms, load_us / 1e3, held, rates, note)


def _loaded(place: str, *models: str) -> SimPlatform:
    """The platform, for the first of the models that it lists, else for its own first."""
    first = load_platform(place)
    for model in models:
        try:
            return load_platform(place, model)
        except MoexpError:  # it does not list this one
            continue
    return first


def _rates(
    geometry: ModelGeometry,
    platform: SimPlatform,
    compute_us: float | None,
    beside_us: float,
    load_us: float,
    listed: bool,
) -> Iterator[Rate]:
    if compute_us is None:
        ar = 1e6 / load_us
        yield Rate("AR, at most", ar, None, "1 / L, computing behind loading")
    else:
        ar = 1e6 / (compute_us - beside_us + max(beside_us, load_us))
        hidden = f"B = {beside_us / 1e3:.1f} ms of C beside loading"
        yield Rate("AR", ar, None, f"1 / (C - B + max(B, L)), {hidden}")
        yield Rate("AR, at most", 1e6 / max(compute_us, load_us), None, "1 / max(C, L), side by side")
    lines = list(_paper_lines(geometry, platform)) if listed else []
    for what, reported, line in lines:
        assert line.implied is not None and line.reported is not None
        yield Rate(what, ar * line.implied, line.implied, f"AR x {line.formula}", PAPER)
        yield Rate(reported, ar * line.reported.value, line.reported.value, f"AR x {line.reported.source}'s", PAPER)
    if not lines:
        yield from _bounds(geometry, ar)


def _paper_lines(geometry: ModelGeometry, platform: SimPlatform) -> Iterator[tuple[str, str, Line]]:
    """The papers' own component figures for this model on this platform, as the audit puts them together: what a line
    is of, what its reported figure is of, and the line.
    """
    model, place = geometry.name, platform.name
    if model in draftexpert.TARGETS and place in draftexpert.PLATFORMS.values():
        lines = {line.id: line for line in draftexpert.cycles(load_paper(draftexpert.NAME))}
        end = f"{draftexpert.TARGETS[model]}.{place}"
        yield "draft expert, K = 4", "full method, reported", lines[f"de.cycle.fixed.{end}"]
    if model in ecospec.TARGETS and model == platform.model:
        lines = {line.id: line for line in ecospec.cycles(load_paper(ecospec.NAME))}
        yield ecospec.BASELINES[model], "  reported", lines[f"eco.cycle.{ecospec.TARGETS[model]}.base"]
        yield "EcoSpec", "  reported", lines[f"eco.cycle.{ecospec.TARGETS[model]}.eco"]


def _bounds(geometry: ModelGeometry, ar: float) -> Iterator[Rate]:
    """What loading alone allows, from a paper's acceptance: speedup alpha k / E of cold steps."""
    how = "AR x alpha k / E"
    if geometry.name in draftexpert.TARGETS:
        paper = load_paper(draftexpert.NAME)
        row = only(paper.table(3).rows, target=geometry.name, platform="CG", drafter="draft-expert")
        alpha = 1 + draftexpert.DRAFT_TOKENS * row["acceptance"]
        experts = metrics.uniform_union(geometry.experts, geometry.top_k, draftexpert.DRAFT_TOKENS + 1)
        bound = metrics.byte_bound(alpha, geometry.top_k, experts)
        yield Rate("draft expert, bytes' bound", ar * bound, bound, f"{how}, alpha {alpha:.2f}, E {experts:.1f}")
    elif geometry.name in ecospec.TARGETS:
        paper = load_paper(ecospec.NAME)
        for method in (ecospec.BASELINES[geometry.name], ecospec.ECOSPEC):
            row = ecospec.step_row(paper, geometry.name, method)
            alpha, experts = row["alpha"], row["experts_per_layer"]
            bound = metrics.byte_bound(alpha, geometry.top_k, experts)
            yield Rate(f"{method}, bytes' bound", ar * bound, bound, f"{how}, alpha {alpha}, E {experts}")
    else:
        yield Rate("speculation", None, None, "no paper gives its acceptance: train, then measure")
