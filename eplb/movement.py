"""From the plan that is in place to a better one, weighing balance against the bytes that move.

A plan costs `price * max(peak, floor) + seconds of moving` (see `trade`). Three roads are tried for each
layer: step by step from the current plan (swaps, and replicas handed from one expert to another), where every
step is a whole plan and the cheapest one on the way is kept; the same from the current plan with the replica
counts of the plan solved from nothing; and that plan itself, its ranks renamed to overlap with the current
ones as much as possible. The cheapest end wins; standing still is the first step of the first road.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.adopt import adopt_counts
from moe_runtime.eplb.effort import Effort
from moe_runtime.eplb.expected import level_for
from moe_runtime.eplb.rename import rename
from moe_runtime.eplb.state import State
from moe_runtime.eplb.steps import step
from moe_runtime.eplb.trade import Trade

PATIENCE = 16  # steps without a cheaper plan before a layer's road ends
STEP_SWEEPS = 3  # of levelling after a step
START_SWEEPS = 20  # and of the plan in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Roads:
    """What all roads of a call of the solver have in common, one entry per layer L.

    table_LRN      the plan in place, from which moves are counted
    goal_L         a layer whose peak is at most this is done
    stay_L         a layer keeps its slots if their peak, with levelled shares if weighted, is at most this
    whole_nodes_L  layers for which the new plan was made node by node
    """

    trade: Trade
    table_LRN: NDArray[np.int64]
    goal_L: NDArray[np.float64]
    stay_L: NDArray[np.float64]
    whole_nodes_L: NDArray[np.bool_]
    effort: Effort
    slots: int
    weighted: bool

    def take(self, layers: NDArray[np.intp]) -> "Roads":
        return Roads(
            trade=self.trade.take(layers),
            table_LRN=self.table_LRN[layers],
            goal_L=self.goal_L[layers],
            stay_L=self.stay_L[layers],
            whole_nodes_L=self.whole_nodes_L[layers],
            effort=self.effort,
            slots=self.slots,
            weighted=self.weighted,
        )

    def level(self, state: State, sweeps: int) -> None:
        if self.weighted:
            level_for(state, self.goal_L, sweeps, self.trade.error)


def cheapest(roads: Roads, fresh: State) -> tuple[State, NDArray[np.bool_]]:
    """The cheapest end of all roads, and the layers L in which nodes hold whole groups there.

    fresh  the plan solved from nothing
    """
    current = State.of(roads.table_LRN, fresh.units_LE)
    best = current.take(np.arange(len(roads.goal_L)))
    roads.level(best, START_SWEEPS)
    layers = np.flatnonzero(best.peak_L > roads.stay_L)
    part, new, roads_here = best.take(layers), fresh.take(layers), roads.take(layers)
    _walk(roads_here, part, part)
    cost_L = roads_here.trade.cost(part, roads_here.table_LRN)
    worth = np.flatnonzero(cost_L > roads_here.trade.price_L * roads_here.trade.peak(new))
    by_node_L = np.zeros(len(roads.goal_L), bool)
    if len(worth):
        better, whole_L = _towards(
            roads_here.take(worth), current.take(layers[worth]), part.take(worth), new.take(worth)
        )
        part.put(worth, better)
        by_node_L[layers[worth]] = whole_L
    best.put(layers, part)
    return best, by_node_L


def _towards(roads: Roads, current: State, best: State, fresh: State) -> tuple[State, NDArray[np.bool_]]:
    """The cheapest of `best` and the two roads that use the fresh plan."""
    adopted = adopt_counts(current, fresh)
    roads.level(adopted, roads.effort.sweeps)
    _walk(roads, best, adopted)
    trade, table = roads.trade, roads.table_LRN
    names_LRN = rename(fresh.expert_LRN, table, trade.topology, fresh.units_LE.shape[1], roads.whole_nodes_L)
    renamed = State.of(names_LRN, fresh.units_LE)
    roads.level(renamed, roads.effort.sweeps)
    cheaper_L = trade.cost(renamed, table) < trade.cost(best, table)
    cheaper = np.flatnonzero(cheaper_L)
    best.put(cheaper, renamed.take(cheaper))
    return best, cheaper_L & roads.whole_nodes_L


def _walk(roads: Roads, best: State, start: State) -> None:
    """Go from `start`, step by step; `best` becomes the cheapest of itself and the plans on the way."""
    active = np.arange(len(roads.goal_L))
    part = start.take(active)
    best_cost_L = roads.trade.cost(best, roads.table_LRN)
    idle_L = np.zeros(len(active), np.int64)
    here, on_L = roads, part.peak_L > np.maximum(roads.goal_L, roads.trade.floor_L)
    for _ in range(roads.effort.steps):
        if not on_L.all():
            keep = np.flatnonzero(on_L)
            active, part, idle_L, here = active[keep], part.take(keep), idle_L[keep], here.take(keep)
        if not len(active):
            return
        made_L = step(part, here.slots, here.weighted)
        here.level(part, STEP_SWEEPS)
        cost_L = here.trade.cost(part, here.table_LRN)
        cheaper_L = cost_L < best_cost_L[active]
        best_cost_L[active[cheaper_L]] = cost_L[cheaper_L]
        best.put(active[cheaper_L], part.take(np.flatnonzero(cheaper_L)))
        idle_L = np.where(cheaper_L, 0, idle_L + 1)
        short_L = part.peak_L > np.maximum(here.goal_L, here.trade.floor_L)
        on_L = made_L & (idle_L < PATIENCE) & short_L
