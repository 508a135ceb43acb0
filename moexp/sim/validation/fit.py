"""Costs of computing on a machine, fitted to a run whose experts were all in memory; its link, from a run's probe.

Of a resident run's steps, verification (and AR, which runs in the same padded shape) costs a fixed time and one an
expert of the union; a draft step a fixed time, one an expert it runs, and one for its draft experts. The fit is by
least squares without negative costs, on the nine tenths of the steps that it explains best.

A run does not tell where in a layer the fixed time stands. Assumed: a third of it outside of the MoE layers (embedding,
dense layers, head), the rest half before a layer's experts are demanded (attention, router) and half after (shared
experts), where it overlaps with their transfers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from moexp.base.errors import MoexpError
from moexp.records import StepRecord
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.link import LinkModel

OUTSIDE = 1 / 3  # share of a step's fixed time that is in no MoE layer
FITTED = 0.9  # share of the steps that a fit counts


@dataclass(frozen=True)
class Fit:
    """Costs of steps, in seconds.

    Attributes:
        verify_s, verify_expert_s: of a padded step, and of each expert of its union.
        draft_s, draft_expert_s: of a draft step, and of each routed expert that it runs.
        extra_s: of all draft experts of a draft step.
        steps: cycles that were fitted.
    """

    verify_s: float
    verify_expert_s: float
    draft_s: float
    draft_expert_s: float
    extra_s: float
    steps: int

    def rescaled(self, ar_s: float, experts: int) -> Fit:
        """The same with experts of another size, for which a one-token AR step takes `ar_s`."""
        expert_s = max(0.0, ar_s - self.verify_s) / experts
        by = expert_s / self.verify_expert_s if self.verify_expert_s else 1.0
        return replace(self, verify_expert_s=expert_s, draft_expert_s=self.draft_expert_s * by)

    def costs(self, moe_layers: int) -> ComputeCosts:
        """As a machine's costs; the module's text states the assumptions."""

        def spread(fixed_s: float, expert_s: float, extra_s: float = 0.0) -> ComputeCosts:
            layer_s = fixed_s * (1 - OUTSIDE) / moe_layers / 2
            return ComputeCosts(
                fixed_s=fixed_s * OUTSIDE,
                attention_s=layer_s,
                shared_s=layer_s,
                expert_s=expert_s,
                draft_expert_s=extra_s / moe_layers,
            )

        draft = spread(self.draft_s, self.draft_expert_s, self.extra_s)
        return replace(spread(self.verify_s, self.verify_expert_s), draft=draft)


def fit_steps(steps: Sequence[StepRecord], methods: Mapping[str, Mapping[str, Any]], moe_layers: int) -> Fit:
    """Fits a resident run's steps.

    Args:
        methods: label -> settings, of those to fit by: AR and chains of fixed length.

    Raises:
        MoexpError: too few of them.
    """
    fitted = [step for step in steps if step.method in methods and step.unique_verify and step.batch is None]
    rows, times, draft_rows, draft_times = [], [], [], []
    for step in fitted:
        method = methods[step.method]
        rows.append((1.0, float(step.unique_verify or 0)))
        times.append(step.cycle_s - step.draft_s)
        if method["drafter"] in ("top-r", "draft-expert") and method["policy"] == "fixed" and step.drafted:
            draft_rows.append((1.0, float(method["r"] * moe_layers), float(method["drafter"] == "draft-expert")))
            draft_times.append(step.draft_s / step.drafted)
    if len({row[1] for row in rows}) < 2 or len(draft_rows) < 2:
        valid = "AR or speculative steps with every expert in memory (the platform `resident` of moexp bench)"
        raise MoexpError("too few resident steps to fit costs by", valid=valid)
    verify = _solve(np.array(rows), np.array(times))
    draft = _solve(np.array(draft_rows), np.array(draft_times))
    return Fit(verify[0], verify[1], draft[0], draft[1], draft[2], len(fitted))


def has_link(store: Mapping[str, Any], probe: Mapping[str, Any]) -> bool:
    """Whether `link_of` knows a store's link."""
    return store.get("pace") is not None or bool(probe.get("bandwidth_bytes_s"))


def link_of(store: Mapping[str, Any], probe: Mapping[str, Any]) -> LinkModel:
    """The link that a recorded store came by.

    A paced store follows its pacer. A disk gives the median of the probe's samples to all transfers together; a read of
    an expert is in `pieces`, so that many fewer experts are under way at once than threads.

    Args:
        store: of the recording.
        probe: of the run's folder.

    Raises:
        MoexpError: a store whose link was not probed.
    """
    pace = store.get("pace")
    if pace is not None:
        return LinkModel(
            pace["bandwidth_gb_s"] * 1e9,
            latency_s=pace["latency_us"] * 1e-6,
            concurrency=pace["concurrency"],
            serial=True,
        )
    if not has_link(store, probe):
        raise MoexpError(f"the link of a {store['kind']} store was not probed", valid="disk, or a paced store")
    threads, pieces = store["io_threads"], store.get("pieces", 1)
    alone = probe.get("alone_bytes_s")
    return LinkModel(
        statistics.median(probe["bandwidth_bytes_s"]),
        statistics.median(alone) if alone else None,
        concurrency=max(1, threads // pieces),
        background=max(1, threads // 4 // pieces),
    )


def _solve(rows_NP: np.ndarray, times_N: np.ndarray) -> list[float]:
    """Costs >= 0 by least squares, twice: the second time without the steps that the first explains worst."""
    costs_P = nnls(rows_NP, times_N)[0]
    off_N = np.abs(rows_NP @ costs_P - times_N)
    near_N = off_N <= np.quantile(off_N, FITTED)
    return nnls(rows_NP[near_N], times_N[near_N])[0].tolist()
