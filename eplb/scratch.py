"""Plans made from nothing: counts, packing, search; over all ranks, or node by node.

Works in whole units (see `loads`) and with equal split; weights come afterwards.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.effort import Effort
from moe_runtime.eplb.pack import first_plan
from moe_runtime.eplb.recount import better_counts
from moe_runtime.eplb.replicate import replica_counts
from moe_runtime.eplb.search import peak_rounds, swap_rounds
from moe_runtime.eplb.state import State


def make_plan(
    units_LE: NDArray[np.float64],
    count_LE: NDArray[np.int64],
    goal_L: NDArray[np.float64],
    effort: Effort,
    *,
    ranks: int,
    slots_per_rank: int,
) -> State:
    """A plan of about `count_LE` replicas, as many in all, its peak brought down to the goal."""
    if slots_per_rank == 2:
        return _paired(units_LE, count_LE, goal_L, effort, ranks)
    state = first_plan(units_LE, count_LE, ranks, slots_per_rank)
    if slots_per_rank > 2:
        swap_rounds(state, goal_L, effort.swap_rounds)
        peak_rounds(state, goal_L, effort.peak_rounds)
    return state


def _paired(
    units_LE: NDArray[np.float64],
    count_LE: NDArray[np.int64],
    goal_L: NDArray[np.float64],
    effort: Effort,
    ranks: int,
) -> State:
    """Heavy replicas with light ones, of better counts."""
    better_LE, peak_L = better_counts(
        units_LE,
        count_LE,
        goal_L,
        ranks=ranks,
        rounds=effort.recounts,
        givers=effort.givers,
        patience=effort.patience,
    )
    state = first_plan(units_LE, better_LE, ranks, 2)
    # Parting an expert that met itself may have cost what the counts gained.
    layers = np.flatnonzero((state.peak_L > peak_L) & (better_LE != count_LE).any(axis=1))
    if len(layers):
        other = first_plan(units_LE[layers], count_LE[layers], ranks, 2)
        lower = np.flatnonzero(other.peak_L < state.peak_L[layers])
        state.put(layers[lower], other.take(lower))
    # Where the pairs are as they should be, no swap helps.
    peak_rounds(state, np.maximum(goal_L, peak_L), effort.peak_rounds)
    return state


def node_by_node(
    units_LE: NDArray[np.float64],
    limit_L: NDArray[np.float64],
    effort: Effort,
    *,
    groups: int,
    nodes: int,
    ranks_per_node: int,
    slots_per_rank: int,
    slots: int,
) -> tuple[NDArray[np.intp], State | None]:
    """Plans in which each node holds whole groups of experts; for layers whose peak can stay in the limit.

    The heaviest node bounds such a plan's peak from below, so most layers are decided without planning.
    Needs groups and slots to divide over the nodes.
    """
    L, E = units_LE.shape
    G, N = groups, nodes
    group_units = units_LE.reshape(L, G, E // G).sum(axis=2)
    packed = first_plan(group_units, np.ones((L, G), np.int64), N, G // N)
    swap_rounds(packed, np.zeros(L), 4)
    peak_rounds(packed, np.zeros(L), 32)
    layers = np.flatnonzero(packed.peak_L <= limit_L * ranks_per_node)
    if not len(layers):
        return layers, None
    groups_LNG = packed.expert_LRN[layers]
    experts = (groups_LNG[..., None] * (E // G) + np.arange(E // G)).reshape(len(layers) * N, E // N)
    units = np.take_along_axis(np.repeat(units_LE[layers], N, axis=0), experts, axis=1)
    goal = np.repeat(limit_L[layers], N)
    parts = make_plan(
        units,
        replica_counts(units, slots // N, ranks_per_node),
        goal,
        effort,
        ranks=ranks_per_node,
        slots_per_rank=slots_per_rank,
    )
    local = parts.expert_LRN.reshape(len(layers) * N, -1)
    table = np.where(local < 0, -1, np.take_along_axis(experts, np.maximum(local, 0), axis=1))
    state = State.of(table.reshape(len(layers), N * ranks_per_node, slots_per_rank), units_LE[layers])
    keep = np.flatnonzero(state.peak_L <= limit_L[layers])
    return layers[keep], state.take(keep) if len(keep) else None
