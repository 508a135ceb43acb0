"""How many bytes a verification step reads, from how many experts it touches (EcoSpec, Table 2).

A step reads every non-expert weight once and each expert of the block's union once:
bytes = resident + MoE layers x E x bytes an expert. The paper's figures follow from its own E in this way, with the
resident part as the one constant that it does not print.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrafficModel:
    """What a step reads besides the number of experts.

    Attributes:
        moe_layers: layers with routed experts.
        expert_bytes: of one routed expert.
        resident_bytes: of everything that every step reads: attention, norms, dense and shared experts, head.
    """

    moe_layers: int
    expert_bytes: float
    resident_bytes: float

    def step_bytes(self, experts_per_layer: float) -> float:
        """Bytes of a step whose block touches E experts a layer."""
        return self.resident_bytes + self.moe_layers * experts_per_layer * self.expert_bytes

    def experts_per_layer(self, step_bytes: float) -> float:
        """The E that a step of so many bytes would have touched."""
        return (step_bytes - self.resident_bytes) / (self.moe_layers * self.expert_bytes)
