"""What computing costs when every expert is in place: plain numbers in seconds, and how they add up to a step."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepCosts:
    """One step over some rows, by where its parts stand in the walk through the layers.

    Attributes:
        before_s: before the first MoE layer: embedding, dense layers.
        lead_s: of each MoE layer, before its experts are demanded: attention and router.
        resident_s: of each MoE layer, while they are on their way: shared experts, draft expert.
        expert_s: each expert of the union, as it is there.
        expert_row_s: of these, each row of it beyond the first that chose it.
        after_s: behind the last layer: head, verification.
        launch_s: the decoding thread's own work for each transfer launched.
    """

    before_s: float = 0.0
    lead_s: float = 0.0
    resident_s: float = 0.0
    expert_s: float = 0.0
    expert_row_s: float = 0.0
    after_s: float = 0.0
    launch_s: float = 0.0

    def union_s(self, experts: int, chosen: int) -> float:
        """Each expert of a union of `experts`, chosen `chosen` times by the rows: all take their mean share."""
        return self.expert_s + self.expert_row_s * (chosen / experts - 1)


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
        block_rows: rows that AR and verification steps compute whatever counts of them; 1: no padding. Padding computes
            every expert over all of them.
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
        if phase == "draft" and self.draft is not None:
            return self.draft.step(phase, rows, draft_experts)
        padded = rows if phase == "draft" else -(-rows // self.block_rows) * self.block_rows
        more = padded - 1
        attention_s = self.attention_s + more * self.attention_row_s
        whole_block = phase != "draft" and self.block_rows > 1
        return StepCosts(
            before_s=self.fixed_s + more * self.fixed_row_s + self.dense_layers * attention_s,
            lead_s=attention_s + self.router_s,
            resident_s=self.shared_s
            + more * self.shared_row_s
            + (self.draft_expert_s * rows if draft_experts else 0.0),
            expert_s=self.expert_s + (more * self.expert_row_s if whole_block else 0.0),
            expert_row_s=0.0 if whole_block else self.expert_row_s,
            launch_s=self.launch_s,
        )

    def scaled(self, by: float) -> ComputeCosts:
        """Everything `by` times as long."""
        names = (name for name in self.__dataclass_fields__ if name.endswith("_s"))
        draft = None if self.draft is None else self.draft.scaled(by)
        return replace(self, draft=draft, **{name: getattr(self, name) * by for name in names})
