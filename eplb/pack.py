"""A first plan: replicas to ranks, heaviest first, in rounds of one replica per rank.

Round k takes the next R heaviest replicas and gives the heaviest to the rank with least load. For two
slots a rank this pairs the heaviest with the lightest, which is optimal; for more it is a start that
the search improves. It costs N sorts of R numbers, all layers at once.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.order import order_of, pick
from moe_runtime.eplb.state import State


def first_plan(
    units_LE: NDArray[np.float64], count_LE: NDArray[np.int64], ranks: int, slots_per_rank: int
) -> State:
    """Place `count_LE` replicas of each expert on R ranks of N slots; at most R * N in a layer.

    No expert is twice on a rank unless it has more than R replicas.
    """
    L, E = units_LE.shape
    R, N = ranks, slots_per_rank
    item_LS, share_LS = heaviest_first(units_LE, count_LE, R * N)
    expert_LNR = np.empty((L, N, R), np.int64)
    load_LR = np.zeros((L, R))
    layer = np.arange(L)[:, None]
    for k in range(N):
        order_LR = order_of(load_LR)
        block = slice(k * R, (k + 1) * R)
        expert_LNR[layer, k, order_LR] = item_LS[:, block]
        load_LR[layer, order_LR] += share_LS[:, block]
    expert_LRN = np.ascontiguousarray(expert_LNR.transpose(0, 2, 1))
    for row in _rows_with_twins(expert_LRN, count_LE, R):
        share_E = np.floor(units_LE[row] / count_LE[row])
        if not _part_twins(expert_LRN[row], share_E, count_LE[row]):
            expert_LRN[row] = _spread(share_E, count_LE[row], R, N)
    return State.of(expert_LRN, units_LE)


def heaviest_first(
    units_LE: NDArray[np.float64], count_LE: NDArray[np.int64], slots: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Experts and equal shares of the replicas by falling share, then by id; -1 and 0 pad.

    Both [L, slots]. Replicas of an expert are adjacent.
    """
    L, E = units_LE.shape
    share_LE = np.floor(units_LE / count_LE)
    order_LE = order_of(-share_LE)
    times_LE = np.zeros((L, E + 1), np.int64)
    times_LE[:, :E] = pick(count_LE, order_LE)
    times_LE[:, E] = slots - times_LE.sum(axis=1)
    ids_LE = np.full((L, E + 1), -1)
    ids_LE[:, :E] = order_LE
    sorted_LE = np.zeros((L, E + 1))
    sorted_LE[:, :E] = pick(share_LE, order_LE)
    place = np.repeat(np.arange(L * (E + 1)), times_LE.reshape(-1))
    return ids_LE.reshape(-1)[place].reshape(L, slots), sorted_LE.reshape(-1)[place].reshape(L, slots)


def _rows_with_twins(
    expert_LRN: NDArray[np.int64], count_LE: NDArray[np.int64], ranks: int
) -> NDArray[np.intp]:
    """Layers in which an expert of at most R replicas is twice on a rank."""
    ordered = np.sort(expert_LRN, axis=2)
    twin = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    layer, rank, slot = np.nonzero(twin)
    avoidable = count_LE[layer, ordered[layer, rank, slot]] <= ranks
    return np.unique(layer[avoidable])


def _part_twins(
    expert_RN: NDArray[np.int64], share_E: NDArray[np.float64], count_E: NDArray[np.int64]
) -> bool:
    """Part replicas of one expert that met on a rank, each by the swap that changes loads least.

    Twins come from experts whose replicas lie across the border of two rounds, so there are few. False if
    one has no swap.
    """
    R, N = expert_RN.shape
    has = np.zeros((R, len(share_E) + 1), np.int64)  # the last column takes the empty slots
    np.add.at(has, (np.arange(R)[:, None], expert_RN), 1)
    share = np.append(share_E, 0.0)
    for rank in np.flatnonzero((has[:, :-1] > 1).any(axis=1)):
        for slot in range(N):
            twin = int(expert_RN[rank, slot])
            if twin < 0 or has[rank, twin] < 2 or count_E[twin] > R:
                continue
            # Ranks without `twin`, and slots there whose expert `rank` has not.
            fits = (has[:, twin] == 0)[:, None] & ((has[rank, expert_RN] == 0) | (expert_RN < 0))
            if not fits.any():
                return False
            change = np.where(fits, np.abs(share[expert_RN] - share[twin]), np.inf)
            other, place = np.unravel_index(int(change.argmin()), change.shape)
            mate = int(expert_RN[other, place])
            expert_RN[rank, slot], expert_RN[other, place] = mate, twin
            has[rank, twin] -= 1
            has[other, mate] -= 1
            has[rank, mate] += 1
            has[other, twin] += 1
    return True


def _spread(
    share_E: NDArray[np.float64], count_E: NDArray[np.int64], ranks: int, slots_per_rank: int
) -> NDArray[np.int64]:
    """A plan without avoidable twins, always: each expert to the ranks with most room, then least load.

    Taking the roomiest ranks keeps rooms within one of each other, so there are always as many ranks with
    room as the next expert has replicas. Experts with more replicas than ranks go round again.
    """
    table = np.full((ranks, slots_per_rank), -1, np.int64)
    room, load = np.full(ranks, slots_per_rank), np.zeros(ranks)
    for expert in np.lexsort((np.arange(len(share_E)), -share_E)):
        left = int(count_E[expert])
        while left:
            order = np.lexsort((load, -room))[: min(left, ranks)]
            order = order[room[order] > 0]
            table[order, slots_per_rank - room[order]] = expert
            room[order] -= 1
            load[order] += share_E[expert]
            left -= len(order)
    return table
