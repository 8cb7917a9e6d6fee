"""Local search on a plan: swaps that bring the heaviest ranks down, many at once.

All layers are searched together, each on its own: a layer's result does not depend on which others
are there. Effort is counted in rounds, never in seconds, so the answer does not depend on speed.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.state import State


def pair_rounds(state: State, goal_L: NDArray[np.float64], rounds: int) -> None:
    """Swap one slot between each heavy rank and a light one, for all pairs of a layer at once.

    In round t the i-th heaviest rank meets the (i + t)-th lightest; the best swap of the pair is made
    if it narrows their difference. Stops for a layer when its heaviest rank carries at most the goal.
    """
    R = state.load_LR.shape[1]
    half = R // 2
    if half == 0:
        return
    active = np.flatnonzero(state.peak_L > goal_L)
    part = state.take(active)
    for turn in range(rounds):
        order_LR = part.load_LR.argsort(axis=1, kind="stable")
        light_LP = np.roll(order_LR[:, :half], -(turn % half), axis=1)
        heavy_LP = order_LR[:, ::-1][:, :half]
        _swap_pairs(part, heavy_LP, light_LP)
        done = part.peak_L <= goal_L[active]
        if done.any():
            state.put(active, part)
            active = active[~done]
            part = state.take(active)
            if not len(active):
                return
    state.put(active, part)


def _swap_pairs(part: State, heavy_LP: NDArray[np.intp], light_LP: NDArray[np.intp]) -> None:
    L, P = heavy_LP.shape
    N = part.expert_LRN.shape[2]
    layer = np.arange(L)[:, None]
    heavy, light = part.expert_LRN[layer, heavy_LP], part.expert_LRN[layer, light_LP]
    heavy_share, light_share = part.share_LRN[layer, heavy_LP], part.share_LRN[layer, light_LP]
    gap_LP = part.load_LR[layer, heavy_LP] - part.load_LR[layer, light_LP]
    # The difference left after the swap of slot i of the heavy with slot j of the light rank.
    left = heavy_share[..., :, None] - light_share[..., None, :]
    left *= -2.0
    left += gap_LP[..., None, None]
    np.abs(left, out=left)
    same = (heavy[..., :, None] == light[..., None, :]) & (heavy[..., :, None] >= 0)
    left += np.where(same.any(axis=3), np.inf, 0.0)[..., :, None]
    left += np.where(same.any(axis=2), np.inf, 0.0)[..., None, :]
    flat = left.reshape(L, P, N * N)
    best_LP = flat.argmin(axis=2)
    gain = np.take_along_axis(flat, best_LP[..., None], axis=2)[..., 0] < gap_LP
    row, pair = np.nonzero(gain)
    i, j = np.divmod(best_LP[row, pair], N)
    exchange(part, row, heavy_LP[row, pair], i, light_LP[row, pair], j)


def exchange(
    part: State,
    row: NDArray[np.intp],
    rank_a: NDArray[np.intp],
    slot_a: NDArray[np.intp],
    rank_b: NDArray[np.intp],
    slot_b: NDArray[np.intp],
) -> None:
    """Swap slots (rank_a, slot_a) and (rank_b, slot_b) of the given layers; no rank twice in a layer."""
    a, b = part.expert_LRN[row, rank_a, slot_a], part.expert_LRN[row, rank_b, slot_b]
    part.expert_LRN[row, rank_a, slot_a], part.expert_LRN[row, rank_b, slot_b] = b, a
    share_a, share_b = part.share_LRN[row, rank_a, slot_a], part.share_LRN[row, rank_b, slot_b]
    part.share_LRN[row, rank_a, slot_a], part.share_LRN[row, rank_b, slot_b] = share_b, share_a
    part.load_LR[row, rank_a] += share_b - share_a
    part.load_LR[row, rank_b] += share_a - share_b


def peak_rounds(state: State, goal_L: NDArray[np.float64], rounds: int) -> None:
    """Bring the heaviest rank down by its best swap with any slot, again and again.

    The best swap minimises the larger of the two ranks' new loads; a layer stops at its goal or when
    no swap helps its heaviest rank.
    """
    active = np.flatnonzero(state.peak_L > goal_L)
    part = state.take(active)
    for _ in range(rounds):
        if not len(active):
            return
        stuck = ~_lower_peak(part)
        done = stuck | (part.peak_L <= goal_L[active])
        if done.any():
            state.put(active, part)
            active = active[~done]
            part = state.take(active)
    state.put(active, part)


def _lower_peak(part: State) -> NDArray[np.bool_]:
    """One swap for each layer, of one slot or else of two; says where one was made."""
    made = _swap_off_peak(part, _single_sets(part.expert_LRN.shape[2]))
    stuck = np.flatnonzero(~made)
    if len(stuck) and 2 < part.expert_LRN.shape[2] <= 16:
        rest = part.take(stuck)
        made[stuck] = _swap_off_peak(rest, _double_sets(part.expert_LRN.shape[2]))
        part.put(stuck, rest)
    return made


def _single_sets(N: int) -> NDArray[np.intp]:
    return np.arange(N)[:, None]


def _double_sets(N: int) -> NDArray[np.intp]:
    return np.stack(np.triu_indices(N, 1), axis=1)


def _swap_off_peak(part: State, sets_MZ: NDArray[np.intp]) -> NDArray[np.bool_]:
    """The best exchange of Z slots of the heaviest rank against Z of another, where one helps.

    M sets of Z slots are tried on both sides. The best minimises the larger of the two new loads.
    """
    L, R, N = part.expert_LRN.shape
    M, Z = sets_MZ.shape
    layer = np.arange(L)
    peak_rank = part.load_LR.argmax(axis=1)
    peak = part.load_LR[layer, peak_rank]
    mine, my_share = part.expert_LRN[layer, peak_rank], part.share_LRN[layer, peak_rank]
    away = (
        my_share[:, sets_MZ].sum(axis=2)[:, :, None, None] - part.share_LRN[..., sets_MZ].sum(axis=3)[:, None]
    )
    worse = np.maximum(peak[:, None, None, None] - away, part.load_LR[:, None, :, None] + away)
    same = (mine[:, :, None, None] == part.expert_LRN[:, None]) & (mine[:, :, None, None] >= 0)
    theirs_has = same.any(axis=3)[:, sets_MZ].any(axis=2)  # [L, M, R]: a slot of the set is there already
    mine_has = same.any(axis=1)[..., sets_MZ].any(axis=3)  # [L, R, M]
    worse[np.broadcast_to(theirs_has[..., None] | mine_has[:, None], worse.shape)] = np.inf
    flat = worse.reshape(L, -1)
    best = flat.argmin(axis=1)
    row = np.flatnonzero(flat[layer, best] < peak)
    mine_set, rank, their_set = np.unravel_index(best[row], (M, R, M))
    for z in range(Z):
        exchange(part, row, peak_rank[row], sets_MZ[mine_set, z], rank, sets_MZ[their_set, z])
    made = np.zeros(L, bool)
    made[row] = True
    return made
