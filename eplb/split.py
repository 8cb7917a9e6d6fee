"""Split weights: how the replicas of an expert share its load, for a plan whose slots are fixed.

Minimising the largest rank load over the shares is a flow problem. Taking the experts in turn and
levelling each one's load over its ranks (water-filling) descends on the sum of squared rank loads, whose
minimum over the shares also minimises the largest load; so plain sweeps converge to the optimum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.order import slots_by_expert
from moe_runtime.eplb.state import State
from moe_runtime.placement.placement import FULL_RANGE

LEAST_PROGRESS = 1e-4  # a sweep that lowers the peak by less than this part of it is the layer's last


def level_shares(state: State, goal_L: NDArray[np.float64], sweeps: int) -> None:
    """Level the shares of replicated experts in place, in layers whose peak is above the goal."""
    active = np.flatnonzero(state.peak_L > goal_L)
    active = active[(state.count_LE[active] > 1).any(axis=1)]
    if not len(active):
        return
    part = state.take(active)
    turns = _turns(part)
    on_L = np.ones(len(active), bool)
    for _ in range(sweeps):
        before = part.peak_L
        for turn in turns:
            _level(part, turn)
        after = part.peak_L
        done_L = on_L & ((after <= goal_L[active]) | (before - after < LEAST_PROGRESS * before))
        if done_L.any():
            on_L &= ~done_L
            if not on_L.any():
                break
            turns = [turn.of(on_L) for turn in turns]
    state.put(active, part)


@dataclass(slots=True)
class _Turn:
    """M experts, of any layers, that no rank has two of: levelling one does not change what another sees.

    C is the largest number of their replicas. slot_MC and rank_MC are places in the part's flattened slots
    and ranks; where not `real_MC` they pad.
    """

    layer_M: NDArray[np.intp]
    units_M: NDArray[np.float64]
    slot_MC: NDArray[np.int64]
    rank_MC: NDArray[np.int64]
    real_MC: NDArray[np.bool_]

    def of(self, on_L: NDArray[np.bool_]) -> "_Turn":
        """The experts of the given layers."""
        keep_M = on_L[self.layer_M]
        return _Turn(
            self.layer_M[keep_M],
            self.units_M[keep_M],
            self.slot_MC[keep_M],
            self.rank_MC[keep_M],
            self.real_MC[keep_M],
        )


def _turns(part: State) -> list[_Turn]:
    """The replicated experts of all layers; those of a layer that share a rank in the order of their ids."""
    L, R, N = part.expert_LRN.shape
    E = part.units_LE.shape[1]
    flat = part.expert_LRN.reshape(L, R * N)
    order = slots_by_expert(flat, E)
    first = part.count_LE.cumsum(axis=1) - part.count_LE
    layer_X, expert_X = np.nonzero(part.count_LE > 1)
    count_X = part.count_LE[layer_X, expert_X]
    C = int(count_X.max())
    real_XC = np.arange(C) < count_X[:, None]
    at_XC = np.minimum(first[layer_X, expert_X][:, None] + np.arange(C), R * N - 1)
    slot_XC = order[layer_X[:, None], at_XC]
    rank_XC = layer_X[:, None] * R + slot_XC // N
    slot_XC = layer_X[:, None] * (R * N) + slot_XC
    turn_X = _turn_numbers(rank_XC, real_XC, L * R)
    turns = []
    for number in range(int(turn_X.max()) + 1):
        own = np.flatnonzero(turn_X == number)
        width = int(count_X[own].max())
        turns.append(
            _Turn(
                layer_X[own],
                part.units_LE[layer_X[own], expert_X[own]],
                slot_XC[own, :width],
                rank_XC[own, :width],
                real_XC[own, :width],
            )
        )
    return turns


def _turn_numbers(rank_XC: NDArray[np.int64], real_XC: NDArray[np.bool_], ranks: int) -> NDArray[np.int64]:
    """int64 [X]: for each expert, the first turn after those of the experts before it on its ranks."""
    turn_X = np.zeros(len(rank_XC), np.int64)
    expert_Y, place_Y = np.nonzero(real_XC)  # a replica each
    rank_Y = rank_XC[expert_Y, place_Y]
    turn = 0
    while True:
        first_R = np.full(ranks, len(rank_XC))  # of the experts left, on each rank
        np.minimum.at(first_R, rank_Y, expert_Y)
        blocked_X = np.zeros(len(rank_XC), bool)
        blocked_X[expert_Y[first_R[rank_Y] < expert_Y]] = True
        if not blocked_X.any():
            return turn_X
        turn += 1
        turn_X[blocked_X] = turn
        left = blocked_X[expert_Y]
        expert_Y, rank_Y = expert_Y[left], rank_Y[left]


def _level(part: State, turn: _Turn) -> None:
    """Water-fill each of the turn's experts over its ranks, in whole units."""
    L, R, N = part.expert_LRN.shape
    share_S, load_R = part.share_LRN.reshape(L * R * N), part.load_LR.reshape(L * R)
    real = turn.real_MC
    share = np.where(real, share_S[turn.slot_MC], 0.0)
    base = np.where(real, load_R[turn.rank_MC] - share, np.inf)
    ordered = np.sort(base, axis=1)
    levels = (turn.units_M[:, None] + ordered.cumsum(axis=1)) / np.arange(1, base.shape[1] + 1)
    # The water stands over the first m ranks, m the last with a level above its own base.
    m = np.maximum((levels > ordered).sum(axis=1) - 1, 0)
    new = np.maximum(np.floor(levels[np.arange(len(m)), m][:, None] - base), 0.0)
    new[:, 0] += turn.units_M - new.sum(axis=1)  # the rounding
    share_S[turn.slot_MC[real]] = new[real]
    # Twins (more replicas than ranks) meet on a rank, so additions must accumulate.
    np.add.at(load_R, turn.rank_MC[real], (new - share)[real])
    part.share_LRN, part.load_LR = share_S.reshape(L, R, N), load_R.reshape(L, R)


def cumulative_table(
    expert_LS: NDArray[np.int32], share_LS: NDArray[np.float64], num_experts: int
) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
    """Shares as `Placement.cumulative_LS`: exclusive starts in 65536ths, every replica at least one.

    Starts are rounded to the nearest 65536th, so a share is off by at most one. Experts whose slots all
    have share 0 are split equally. uint16 [L, S]; with it, float64 [L, S], the part of its expert that each
    slot then carries, 0 where empty.
    """
    L, S = expert_LS.shape
    order_LS = slots_by_expert(expert_LS, num_experts)
    at = (order_LS + (np.arange(L) * S)[:, None]).reshape(-1)
    key = np.where(expert_LS < 0, num_experts, expert_LS).reshape(-1)[at]
    key += np.repeat(np.arange(L) * (num_experts + 1), S)
    share = share_LS.reshape(-1)[at]
    size = L * (num_experts + 1)
    count = np.bincount(key, minlength=size)
    total = np.bincount(key, weights=share, minlength=size)
    first = count.cumsum() - count  # position of an expert's first slot in the flattened order
    place = np.arange(L * S) - first[key]
    times, whole = count[key], total[key]
    running = share.reshape(L, S).cumsum(axis=1).reshape(-1) - share  # of a layer, so exact
    running -= np.repeat(running[np.minimum(first, L * S - 1)], count)
    begin = np.where(whole > 0, running / np.where(whole > 0, whole, 1), place / times)
    begin = np.rint(begin * FULL_RANGE)
    # Each starts at least one after the one before, and leaves one for each that follows.
    group = key * (4.0 * FULL_RANGE)
    begin = np.maximum.accumulate(begin - place + group) - group + place
    begin = np.minimum(begin, FULL_RANGE - (times - place))
    end = np.append(begin[1:], FULL_RANGE)
    end[place == times - 1] = FULL_RANGE
    starts_LS, part_LS = np.zeros(L * S, np.uint16), np.zeros(L * S)
    starts_LS[at], part_LS[at] = begin, (end - begin) / FULL_RANGE
    empty_LS = expert_LS < 0
    starts_LS, part_LS = starts_LS.reshape(L, S), part_LS.reshape(L, S)
    starts_LS[empty_LS], part_LS[empty_LS] = 0, 0.0
    return starts_LS, part_LS
