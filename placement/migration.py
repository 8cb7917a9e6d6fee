"""Migration plan: which slots must be filled, and from which slot each one's weights come.

Owns the choice of sources, near before far and spread over the replicas at hand. How bytes travel, in
which order, and when a layer is committed is not decided here.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.errors import PlacementError
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.topology import LINK_CLASSES, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """M moves, ordered by layer, then by target slot; all arrays int64 [M].

    layer_M, slot_M  the slot to fill (target placement)
    source_M         the slot of the same layer in the current placement that has the weights
    expert_M         whose weights they are
    link_M           index into LINK_CLASSES
    expert_bytes     bytes of one expert's weights in a layer
    """

    layer_M: NDArray[np.int64]
    slot_M: NDArray[np.int64]
    source_M: NDArray[np.int64]
    expert_M: NDArray[np.int64]
    link_M: NDArray[np.int64]
    topology: Topology
    num_layers: int
    expert_bytes: float

    def __len__(self) -> int:
        return len(self.slot_M)

    @property
    def total_bytes(self) -> float:
        return len(self) * self.expert_bytes

    @property
    def bytes_by_link(self) -> dict[str, float]:
        counts = np.bincount(self.link_M, minlength=len(LINK_CLASSES))
        return {name: float(n) * self.expert_bytes for name, n in zip(LINK_CLASSES, counts, strict=True)}

    @property
    def moves_L(self) -> NDArray[np.int64]:
        return np.bincount(self.layer_M, minlength=self.num_layers)

    @property
    def seconds(self) -> float:
        """All moves one after the other; links in parallel make it less."""
        return sum(
            cost * num_bytes
            for cost, num_bytes in zip(
                self.topology.seconds_per_byte, self.bytes_by_link.values(), strict=True
            )
        )


def plan_migration(
    current: Placement, target: Placement, topology: Topology, expert_bytes: float = 1.0
) -> MigrationPlan:
    """The moves from `current` to `target`: one for every slot whose expert changes to another.

    The source is a slot of the same rank if there is one, else of the same node, else any; among equals
    the one that has served fewest moves of this plan, then the lowest. A slot that becomes empty needs none.

    Raises PlacementError if the two placements differ in layers, experts, slots or ranks.
    """
    for name in ("num_layers", "num_experts", "num_slots", "num_ranks"):
        if getattr(current, name) != getattr(target, name):
            raise PlacementError(
                f"current placement: {name} = {getattr(current, name)}, target: {getattr(target, name)}"
            )
    if topology.num_ranks != target.num_ranks:
        raise PlacementError(f"topology {topology} is not of {target.num_ranks} ranks")
    changed = (current.slot_to_expert_LS != target.slot_to_expert_LS) & (target.slot_to_expert_LS >= 0)
    layer_M, slot_M = np.nonzero(changed)
    expert_M = target.slot_to_expert_LS[layer_M, slot_M].astype(np.int64)
    start, slots = current.replicas
    served = np.zeros(current.slot_to_expert_LS.shape, np.int64)
    n = target.slots_per_rank
    source_M, link_M = np.zeros(len(slot_M), np.int64), np.zeros(len(slot_M), np.int64)
    for m, (layer, slot, expert) in enumerate(zip(layer_M, slot_M, expert_M, strict=True)):
        candidates = slots[layer, start[layer, expert] : start[layer, expert + 1]]
        links = topology.link_class(candidates // n, slot // n)
        pick = np.lexsort((candidates, served[layer, candidates], links))[0]
        source_M[m], link_M[m] = candidates[pick], links[pick]
        served[layer, candidates[pick]] += links[pick] > 0
    return MigrationPlan(
        layer_M=layer_M.astype(np.int64),
        slot_M=slot_M.astype(np.int64),
        source_M=source_M,
        expert_M=expert_M,
        link_M=link_M,
        topology=topology,
        num_layers=target.num_layers,
        expert_bytes=expert_bytes,
    )
