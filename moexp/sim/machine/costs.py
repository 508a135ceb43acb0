"""What computing costs while every expert is in memory, in seconds: the only cost model of the simulator.

Platforms, probes and fits give a `ComputeCosts`; a step's share of it is a `StepCosts`:

    step = fixed + layers x attention + MoE layers x (router + shared) + sum over experts of the union: expert(its rows)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCosts:
    """One step over some rows, by where its parts stand in the walk through the layers.

    Attributes:
        before_s: outside of the MoE layers: embedding, dense layers, head.
        lead_s: of each MoE layer, before its experts are demanded: attention and router.
        resident_s: of each MoE layer, while its experts are on their way: shared experts, draft expert.
        expert_s: each expert of the union, once it is in memory.
        expert_row_s: each row beyond an expert's first.
        launch_s: the decoding thread's own work for each transfer that it launches.
    """

    before_s: float
    lead_s: float
    resident_s: float
    expert_s: float
    expert_row_s: float
    launch_s: float

    def union_s(self, experts: int, chosen: float) -> float:
        """Each expert of a union of `experts` that the rows choose `chosen` times: all take their mean share."""
        return self.expert_s + self.expert_row_s * (chosen / experts - 1)

    def total_s(self, moe_layers: int, experts: float) -> float:
        """A step of one row that computes `experts` in each MoE layer and waits for none."""
        return self.before_s + moe_layers * (self.lead_s + self.resident_s + experts * self.expert_s)

    def beside_s(self, moe_layers: int, experts: int) -> float:
        """Of `total_s`, what runs while a layer's experts come: resident ones, and every routed one but the last."""
        return moe_layers * (self.resident_s + (experts - 1) * self.expert_s)


@dataclass(frozen=True)
class ComputeCosts:
    """A model on a machine. `..._row_s` is the cost of each row beyond the first.

    Attributes:
        fixed_s, fixed_row_s: once a step: embedding, dense feed-forward, head, and what no other part accounts for.
        attention_s, attention_row_s: a decoder layer.
        router_s: a MoE layer's router and bookkeeping.
        shared_s, shared_row_s: a MoE layer's shared experts.
        expert_s, expert_row_s: a routed expert.
        draft_expert_s: a MoE layer's draft expert over one row.
        launch_s: the decoding thread's work for each transfer that it launches.
        dense_layers: decoder layers without routed experts.
        block_rows: AR and verification steps are padded to a multiple of it; padding computes every expert over all
            rows. 1: no padding.
        draft: of draft steps, where they run other kernels; None: the same.
    """

    fixed_s: float = 0.0
    fixed_row_s: float = 0.0
    attention_s: float = 0.0
    attention_row_s: float = 0.0
    router_s: float = 0.0
    shared_s: float = 0.0
    shared_row_s: float = 0.0
    expert_s: float = 0.0
    expert_row_s: float = 0.0
    draft_expert_s: float = 0.0
    launch_s: float = 0.0
    dense_layers: int = 0
    block_rows: int = 1
    draft: ComputeCosts | None = None

    def step(self, phase: str, rows: int, draft_experts: bool) -> StepCosts:
        """A step of `rows` live rows in a phase ("draft" steps are not padded)."""
        drafting = phase == "draft"
        if drafting and self.draft is not None:
            return self.draft.step(phase, rows, draft_experts)
        padded = not drafting and self.block_rows > 1
        more = (-(-rows // self.block_rows) * self.block_rows if padded else rows) - 1
        attention_s = self.attention_s + more * self.attention_row_s
        return StepCosts(
            before_s=self.fixed_s + more * self.fixed_row_s + self.dense_layers * attention_s,
            lead_s=attention_s + self.router_s,
            resident_s=self.shared_s
            + more * self.shared_row_s
            + (self.draft_expert_s * rows if draft_experts else 0.0),
            expert_s=self.expert_s + (more * self.expert_row_s if padded else 0.0),
            expert_row_s=0.0 if padded else self.expert_row_s,
            launch_s=self.launch_s,
        )
