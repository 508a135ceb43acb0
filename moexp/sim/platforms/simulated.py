"""A platform and routing as the machine to simulate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moexp.base.errors import MoexpError
from moexp.data.traces import RoutingGeometry
from moexp.sim.machine.machine import MachineModel
from moexp.sim.platforms.files import load_platform
from moexp.sim.platforms.geometry import PUBLISHED_MODELS, ModelGeometry
from moexp.sim.platforms.platform import SimPlatform


@dataclass(frozen=True)
class Simulated:
    """What is simulated, and what its table must state.

    Attributes:
        machine: its capacity is the platform's slots; None: what one cycle needs.
        moe_layers: layers that routing is priced for.
        cache: what stays between cycles.
        platform, model: names.
        notes: what was assumed.
    """

    machine: MachineModel
    moe_layers: int
    cache: str
    platform: str
    model: str
    notes: tuple[str, ...] = ()

    def with_bandwidth(self, bandwidth_bytes_s: float) -> Simulated:
        """The same behind another link; what a transfer gets alone scales with it."""
        link = self.machine.link
        by = bandwidth_bytes_s / link.bandwidth_bytes_s
        alone = None if link.alone_bytes_s is None else link.alone_bytes_s * by
        link = replace(link, bandwidth_bytes_s=bandwidth_bytes_s, alone_bytes_s=alone)
        return replace(self, machine=replace(self.machine, link=link))


def on_platform(
    platform: SimPlatform, geometry: ModelGeometry | None, recorded: RoutingGeometry, expert_bytes: int
) -> Simulated:
    """A platform as a machine.

    Args:
        geometry: of its model; None: the recorded one, no published model.
        recorded: of the routing.
        expert_bytes: of the recorded model's experts, where `geometry` is None.

    Raises:
        MoexpError: unknown expert bytes, or slots for less than a token's experts.
    """
    notes = []
    if geometry is not None:
        shape = geometry.moe_layers, geometry.experts, geometry.top_k
        dense_layers, expert_bytes = geometry.dense_layers, platform.expert_bytes(geometry)
    elif expert_bytes:
        shape = len(recorded.layers), recorded.num_experts, recorded.top_k
        dense_layers = min(recorded.layers)
    else:
        raise MoexpError(f"the size of {platform.model}'s experts is not known", where=platform.name,
                         valid="a recording, or a platform of a published model")  # fmt: skip
    moe_layers, experts, top_k = shape
    if shape != (len(recorded.layers), recorded.num_experts, recorded.top_k):
        notes.append(
            f"Routing of a model with {len(recorded.layers)} MoE layers, {recorded.num_experts} experts and "
            f"top-{recorded.top_k} priced for {platform.model} ({moe_layers}, {experts} and top-{top_k}): recorded "
            "layers are used in turn, experts and top-k stay as recorded."
        )
    if platform.compute.draft_expert_us is None:
        notes.append("The platform gives no cost of a draft expert: taken as that of the shared experts.")
    capacity = platform.slots.experts(moe_layers * experts, expert_bytes)
    if capacity is not None and capacity < recorded.top_k:
        raise MoexpError(f"slots for {capacity} experts", where=platform.name, valid=f"at least {recorded.top_k}")
    machine = MachineModel(platform.link.model(), platform.compute.costs(dense_layers), expert_bytes, capacity)
    return Simulated(machine, moe_layers, platform.slots.policy, platform.name, platform.model, tuple(notes))


def load_simulated(
    name_or_path: str, recorded: RoutingGeometry, expert_bytes: int, model: str | None = None
) -> Simulated:
    """The machine of a platform given by name or file (see `on_platform`).

    Args:
        model: of those that the platform has constants for; None: its first.

    Raises:
        MoexpError: no such platform or model.
    """
    platform = load_platform(name_or_path, model)
    return on_platform(platform, PUBLISHED_MODELS.get(platform.model), recorded, expert_bytes)
