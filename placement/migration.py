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
    source_M = _sources(current, topology, layer_M, slot_M, expert_M)
    n = target.slots_per_rank
    return MigrationPlan(
        layer_M=layer_M.astype(np.int64),
        slot_M=slot_M.astype(np.int64),
        source_M=source_M,
        expert_M=expert_M,
        link_M=topology.link_class(source_M // n, slot_M // n),
        topology=topology,
        num_layers=target.num_layers,
        expert_bytes=expert_bytes,
    )


def _sources(
    current: Placement,
    topology: Topology,
    layer_M: NDArray[np.int64],
    slot_M: NDArray[np.int64],
    expert_M: NDArray[np.int64],
) -> NDArray[np.int64]:
    """int64 [M]: where each move's weights come from.

    Only moves of one expert in a layer compete for sources, so the first moves of all experts choose at
    once, then their second ones, and so on.
    """
    start, slots = current.replicas
    n, S, everywhere = current.slots_per_rank, current.num_slots, len(LINK_CLASSES)
    first_M, end_M = start[layer_M, expert_M], start[layer_M, expert_M + 1]
    served = np.zeros(current.slot_to_expert_LS.shape, np.int64)
    source_M = np.zeros(len(slot_M), np.int64)
    turn_M = _turns(layer_M * current.num_experts + expert_M)
    for turn in range(int(turn_M.max(initial=-1)) + 1):
        moves = np.flatnonzero(turn_M == turn)
        first, end, layer = first_M[moves], end_M[moves], layer_M[moves]
        place_MC = first[:, None] + np.arange((end - first).max())
        slot_MC = slots[layer[:, None], np.minimum(place_MC, S - 1)].astype(np.int64)
        link_MC = topology.link_class(slot_MC // n, slot_M[moves, None] // n)
        link_MC[place_MC >= end[:, None]] = everywhere  # not a replica of this expert
        rank_MC = (link_MC * (S + 1) + served[layer[:, None], slot_MC]) * S + slot_MC
        pick = rank_MC.argmin(axis=1)[:, None]
        source_M[moves] = np.take_along_axis(slot_MC, pick, axis=1)[:, 0]
        served[layer, source_M[moves]] += np.take_along_axis(link_MC, pick, axis=1)[:, 0] > 0
    return source_M


def _turns(key_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [M]: how many entries before this one have the same key."""
    order = np.argsort(key_M, kind="stable")
    ordered = key_M[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    turns = np.zeros(len(key_M), np.int64)
    turns[order] = np.arange(len(key_M)) - np.repeat(begins, np.diff(begins, append=len(key_M)))
    return turns
