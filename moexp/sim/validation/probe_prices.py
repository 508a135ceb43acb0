"""Costs of a run's machine while a request was decoded, from the probes beside it; none of the run's own times count.

Of the steps that probes time, the computing counts and never the waiting; the link's rates are those of bursts through
an idle store.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from moexp.records import ProbeRecord
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.link import LinkModel

DRAFT_ONE, DRAFT_MORE, AR_STEP, VERIFY_STEP, BURST = "draft-one", "draft-more", "ar", "verify", "burst"
STEP_KINDS = (DRAFT_ONE, DRAFT_MORE, AR_STEP, VERIFY_STEP)
NEAREST = 2  # probes of a kind before requests, and behind them

Parts = Mapping[str, float]
Span = tuple[int, int]
"""Requests of a run by their number in order: the first, and one behind the last."""


class Prices:
    """The probes of a run, in the order of the requests that they follow."""

    def __init__(self, records: Iterable[ProbeRecord]) -> None:
        self._by_kind: dict[str, list[ProbeRecord]] = defaultdict(list)
        for record in sorted(records, key=lambda one: one.place):
            self._by_kind[record.kind].append(record)

    @property
    def complete(self) -> bool:
        """Whether every kind of step was probed."""
        return all(kind in self._by_kind for kind in STEP_KINDS)

    def near(self, kind: str, span: Span) -> dict[str, float]:
        """Each part's mean over the probes among the requests of `span`; where they are few, the nearest count too."""
        records = self._by_kind[kind]
        chosen = [one for one in records if span[0] <= one.place < span[1]]
        if len(chosen) < 2 * NEAREST:
            chosen = [one for one in records if one.place < span[0]][-NEAREST:] + chosen
            chosen += [one for one in records if one.place >= span[1]][:NEAREST]
        return {name: statistics.fmean(one.parts[name] for one in chosen) for name in chosen[0].parts}

    def costs(self, span: Span, layers: int, moe_layers: int) -> ComputeCosts:
        """Computing, as it was around requests; every kind of step must have been probed.

        Args:
            span: see `near`.
            layers, moe_layers: decoder layers, and those of them with experts.
        """
        draft_one, draft_more, ar, verify = (self.near(kind, span) for kind in STEP_KINDS)
        launch_s = _slope(_experts(ar, verify, moe_layers), [_ahead(step) / moe_layers for step in (ar, verify)])
        block = _costs(ar, verify, layers, moe_layers, launch_s)
        draft = _costs(draft_one, draft_more, layers, moe_layers, launch_s)
        return replace(block, draft=draft)

    def link(self, span: Span, known: LinkModel, expert_bytes: int) -> LinkModel:
        """`known`, with the rates of the bursts around requests, if any were probed."""
        if BURST not in self._by_kind:
            return known
        burst = {int(size): seconds for size, seconds in self.near(BURST, span).items()}
        largest = max(burst)
        together = largest * expert_bytes / burst[largest]
        return replace(known, bandwidth_bytes_s=together, alone_bytes_s=expert_bytes / burst[min(burst)], latency_s=0.0)


def _costs(few: Parts, more: Parts, layers: int, moe_layers: int, launch_s: float) -> ComputeCosts:
    """Costs from two steps of one path, of which the second computes more experts, each of which has to come in.

    Args:
        launch_s: time that launching a transfer adds before a layer's experts.
    """
    experts = _experts(few, more, moe_layers)
    computed = [(step["routed"] - step["stall"]) / moe_layers for step in (few, more)]
    expert_s = _slope(experts, computed)
    once_s = computed[0] - experts[0] * expert_s  # bookkeeping of the layer
    if not expert_s or once_s < 0:
        expert_s, once_s = computed[1] / experts[1], 0.0
    router_s = (few["moe"] - few["routed"] - few["shared"] - few["draft"]) / moe_layers

    def resident_s(step: Parts, launched: float) -> float:
        return max(0.0, _ahead(step) / moe_layers - launched * launch_s - router_s)

    # A draft step with draft experts computes the shared ones in the same block: their cost is the other step's.
    shared_s = resident_s(few, experts[0]) if not few["draft"] else resident_s(more, experts[1])
    draft_expert_s = max(0.0, resident_s(few, experts[0]) - shared_s) if few["draft"] else 0.0
    attention_s = statistics.fmean(step["attention"] for step in (few, more)) / layers
    fixed_s = statistics.fmean(step["total"] - step["attention"] - step["moe"] for step in (few, more))
    return ComputeCosts(
        fixed_s=max(0.0, fixed_s),
        attention_s=attention_s,
        router_s=router_s + once_s,
        shared_s=shared_s,
        expert_s=expert_s,
        draft_expert_s=draft_expert_s,
        launch_s=launch_s,
        dense_layers=layers - moe_layers,
    )


def _experts(few: Parts, more: Parts, moe_layers: int) -> list[float]:
    """Experts a layer."""
    return [step["experts"] / moe_layers for step in (few, more)]


def _ahead(step: Parts) -> float:
    """Of a step's MoE layers, everything but the experts: router, launching of transfers, resident compute."""
    return step["moe"] - step["routed"]


def _slope(at: list[float], values: list[float]) -> float:
    """What each further expert adds; 0 where nothing is added."""
    return max(0.0, (values[1] - values[0]) / (at[1] - at[0])) if at[1] > at[0] else 0.0
