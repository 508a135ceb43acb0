"""A platform's constants as a machine to simulate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moexp.base.errors import MoexpError
from moexp.data.traces import RoutingGeometry
from moexp.sim.costs import ComputeCosts
from moexp.sim.link import LinkModel
from moexp.sim.machine import MachineModel


@dataclass(frozen=True)
class Simulated:
    """What is simulated, and what its table must say of it.

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


def on_platform(platform: Any, geometry: Any | None, recorded: RoutingGeometry, expert_bytes: int) -> Simulated:
    """A `moexp.sim.platform.SimPlatform` as a machine.

    Args:
        platform: the loaded platform.
        geometry: of its model (`moexp.sim.geometry.Geometry`); None: the recorded one, no published model.
        recorded: of the routing.
        expert_bytes: of the recorded model's experts, where `geometry` is None.
    """
    link, compute = platform.link, platform.compute
    notes = []
    if geometry is None:
        if not expert_bytes:
            raise MoexpError(f"the size of {platform.model}'s experts is not known", where=platform.name,
                             valid="a recording, or a platform of a published model")  # fmt: skip
        moe_layers, dense_layers, bytes_each = len(recorded.layers), min(recorded.layers), expert_bytes
        capacity = None if platform.slots.bytes is None else platform.slots.bytes // bytes_each
        if platform.slots.fraction is not None:
            capacity = int(platform.slots.fraction * moe_layers * recorded.num_experts)
    else:
        moe_layers, dense_layers = geometry.moe_layers, geometry.dense_layers
        bytes_each = platform.expert_bytes(geometry)
        room = platform.slot_bytes(geometry)
        capacity = None if room is None else room // bytes_each
        if (geometry.experts, geometry.top_k, moe_layers) != (
            recorded.num_experts,
            recorded.top_k,
            len(recorded.layers),
        ):
            notes.append(
                f"Routing of a model with {len(recorded.layers)} MoE layers, {recorded.num_experts} experts and "
                f"top-{recorded.top_k} priced for {geometry.name} ({moe_layers}, {geometry.experts} and "
                f"top-{geometry.top_k}): recorded layers are used in turn, experts and top-k stay as recorded."
            )
    draft_expert_us = compute.draft_expert_us
    if draft_expert_us is None:
        draft_expert_us = compute.shared_us(1)
        notes.append("The platform gives no cost of a draft expert: taken as that of the shared experts.")
    costs = ComputeCosts(
        fixed_s=compute.fixed_us * 1e-6,
        fixed_row_s=compute.fixed_us_per_token * 1e-6,
        attention_s=compute.attention_us_per_layer * 1e-6,
        attention_row_s=compute.attention_us_per_token * 1e-6,
        router_s=compute.router_us * 1e-6,
        shared_s=compute.shared_us_per_layer * 1e-6,
        shared_row_s=compute.shared_us_per_token * 1e-6,
        expert_s=compute.routed_us_per_expert * 1e-6,
        expert_row_s=compute.routed_us_per_token * 1e-6,
        draft_expert_s=draft_expert_us * 1e-6,
        dense_layers=dense_layers,
        block_rows=compute.block_rows,
    )
    model = LinkModel(
        link.bandwidth_gb_s * 1e9,
        None if link.alone_gb_s is None else link.alone_gb_s * 1e9,
        link.latency_us * 1e-6,
        link.concurrency,
        link.prefetch_concurrency,
    )
    if capacity is not None and capacity < recorded.top_k:
        raise MoexpError(f"slots for {capacity} experts", where=platform.name, valid=f"at least {recorded.top_k}")
    machine = MachineModel(model, costs, bytes_each, capacity)
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
    from moexp.sim.geometry import GEOMETRIES
    from moexp.sim.platform import load_platform

    platform = load_platform(name_or_path, model)
    return on_platform(platform, GEOMETRIES.get(platform.model), recorded, expert_bytes)
