"""What a change of placement costs: seconds of carrying its peak over the horizon, and of moving weights."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.expected import expected_peak
from moe_runtime.eplb.state import State
from moe_runtime.placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """What moves and balance cost.

    price_L  seconds per unit of a layer's peak over the horizon
    floor_L  peaks below this are as good as this
    expert_bytes  of one expert's weights in a layer
    error    relative standard error of the experts' loads; peaks are those to be expected under it
    """

    topology: Topology
    price_L: NDArray[np.float64]
    floor_L: NDArray[np.float64]
    expert_bytes: float
    error: float

    def take(self, layers: NDArray[np.intp]) -> "Trade":
        return Trade(
            topology=self.topology,
            price_L=self.price_L[layers],
            floor_L=self.floor_L[layers],
            expert_bytes=self.expert_bytes,
            error=self.error,
        )

    def move_seconds(
        self, expert_LRN: NDArray[np.int64], current_LRN: NDArray[np.int64], num_experts: int
    ) -> NDArray[np.float64]:
        """float64 [L]: seconds to fill the slots that differ, each from the nearest current replica.

        Costs are added link class by link class from whole counts, so the sum has one value only.
        """
        moved = (expert_LRN != current_LRN) & (expert_LRN >= 0)
        layer, rank, slot = np.nonzero(moved)
        link = nearest_link(
            current_LRN, self.topology, num_experts, layer, rank, expert_LRN[layer, rank, slot]
        )
        seconds = np.zeros(len(expert_LRN))
        for k, cost in enumerate(self.topology.seconds_per_byte):
            seconds += np.bincount(layer[link == k], minlength=len(expert_LRN)) * (cost * self.expert_bytes)
        return seconds

    def peak(self, state: State) -> NDArray[np.float64]:
        """float64 [L]: the peak that counts."""
        return np.maximum(expected_peak(state, self.error), self.floor_L)

    def cost(self, state: State, current_LRN: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [L]: seconds."""
        moving = self.move_seconds(state.expert_LRN, current_LRN, state.units_LE.shape[1])
        return self.price_L * self.peak(state) + moving


def nearest_link(
    current_LRN: NDArray[np.int64],
    topology: Topology,
    num_experts: int,
    layer: NDArray[np.intp],
    rank: NDArray[np.intp],
    expert: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Link class (0 same rank, 1 same node, 2 other) over which `expert` reaches `rank`."""
    L, R, _ = current_LRN.shape
    on_rank = np.zeros((L, R, num_experts + 1), bool)  # column E takes the empty slots
    rows = np.arange(L)[:, None, None]
    on_rank[rows, np.arange(R)[None, :, None], current_LRN] = True
    by_node = on_rank.reshape(L, topology.nodes, topology.ranks_per_node, num_experts + 1)
    on_node: NDArray[np.bool_] = np.logical_or.reduce(by_node, axis=2)
    here = on_rank[layer, rank, expert]
    near = on_node[layer, topology.node_of(rank), expert]
    return np.where(here, 0, np.where(near, 1, 2))
