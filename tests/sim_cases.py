"""Small cycles, links and machines for the simulator's tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moexp.runtime.store.counters import Phase
from moexp.sim.machine.costs import ComputeCosts
from moexp.sim.machine.cycles import Cycle, Keys, Step, key_table, routed_step
from moexp.sim.machine.link import LinkModel
from moexp.sim.machine.machine import MachineModel

LAYERS, EXPERTS, TOP_K = (1, 2, 3), 8, 3
TABLE = key_table(LAYERS, EXPERTS)
BYTES = 1000

links = st.builds(
    LinkModel,
    bandwidth_bytes_s=st.sampled_from([1e3, 1e5, 1e7]),
    alone_bytes_s=st.sampled_from([None, 5e2, 4e4]),
    latency_s=st.sampled_from([0.0, 0.001, 0.3]),
    concurrency=st.integers(1, 4),
    background=st.sampled_from([None, 1, 2]),
    serial=st.booleans(),
)
costs = st.builds(
    ComputeCosts,
    fixed_s=st.sampled_from([0.0, 0.5]),
    attention_s=st.sampled_from([0.0, 0.01]),
    shared_s=st.sampled_from([0.0, 0.02, 1.0]),
    shared_row_s=st.sampled_from([0.0, 0.001]),
    expert_s=st.sampled_from([0.0, 0.003, 0.4]),
    expert_row_s=st.sampled_from([0.0, 0.001]),
    draft_expert_s=st.sampled_from([0.0, 0.01]),
    launch_s=st.sampled_from([0.0, 0.0005]),
    block_rows=st.sampled_from([1, 4]),
)


def machine(link: LinkModel | None = None, capacity: int | None = None, **changes: float) -> MachineModel:
    """A machine that computes in no time unless told otherwise."""
    return MachineModel(link or LinkModel(1e6), ComputeCosts(**changes), BYTES, capacity)  # type: ignore[arg-type]


def demand_step(phase: Phase, demands: list[Keys], beyond: list[Keys] | None = None) -> Step:
    """A step of one row that demands just these keys, by layer."""
    return Step(phase, 1, False, max(map(len, demands)), demands, beyond)


def routing(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Random routing [L, rows, k]; lower experts are more popular."""
    skewed = rng.random((len(LAYERS), rows, EXPERTS)) * np.linspace(1, 2, EXPERTS)
    return skewed.argsort(-1)[:, :, :TOP_K].astype(np.int16)


def ar_cycles(seed: int, tokens: int) -> list[Cycle]:
    """Plain decoding."""
    rng = np.random.default_rng(seed)
    return [Cycle([routed_step(TABLE, routing(rng, 1), "ar")], 1) for _ in range(tokens)]


def spec_cycles(seed: int, count: int, *, drafts: int = 2, prefetch: bool = False) -> list[Cycle]:
    """Drafting by top-1 and verifying; the verifier routes nearly as the drafter."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rows_LBk = routing(rng, drafts + 1)
        steps = [
            routed_step(TABLE, rows_LBk[:, at : at + 1], "draft", top_r=1, draft_experts=True, prefetch=prefetch)
            for at in range(drafts)
        ]
        verified_LBk = np.where(rng.random((1, drafts + 1, 1)) < 0.3, routing(rng, drafts + 1), rows_LBk)
        found.append(Cycle([*steps, routed_step(TABLE, verified_LBk, "verify")], int(rng.integers(1, drafts + 2))))
    return found
