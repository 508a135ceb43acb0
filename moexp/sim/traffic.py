"""How many bytes a verification step reads, from how many experts it touches."""

from __future__ import annotations


def step_bytes(moe_layers: float, experts_per_layer: float, expert_bytes: float, resident_bytes: float) -> float:
    """Bytes of a step: every weight that is in no routed expert once, and each expert of the block's union once.

    The paper's figures follow from its own E in this way, with the resident part as the one constant that it does not
    print.

    Args:
        experts_per_layer: E, routed experts of the block's union in a MoE layer.
        resident_bytes: of all that every step reads: attention, norms, dense and shared experts, head.

    Paper: EcoSpec Table 2.
    """
    return resident_bytes + moe_layers * experts_per_layer * expert_bytes
