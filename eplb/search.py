"""Local search on a plan: swaps that bring the heaviest ranks down, many at once.

All layers are searched together, each on its own: a layer's result does not depend on which others
are there. Effort is counted in rounds, never in seconds, so the answer does not depend on speed.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.order import order_of
from moe_runtime.eplb.state import State

FINE = float(1 << 28)  # loads are compared in 2^-28 of the peak: thrice that fits 32 bits


def swap_rounds(state: State, goal_L: NDArray[np.float64], rounds: int) -> None:
    """Swaps between heavy and light ranks, of one slot each or two, many in a layer at once.

    The H heaviest ranks share the others out among them, by turns, and each makes the best swap with one of
    its own. H is half the ranks at first, then half of that, and so on to two or three, with so many `rounds`
    each: most ranks are brought near the mean, then the heaviest have more to choose from. A layer is done
    when its heaviest rank carries at most the goal.
    """
    heavy, choices = state.load_LR.shape[1] // 2, _choices(state.expert_LRN.shape[2])
    on = np.flatnonzero(state.peak_L > goal_L)
    part = state.take(on)
    for step in range(max(1, heavy.bit_length() - 1) * rounds):
        if heavy == 0 or not len(on):
            return
        _swap_off_heavy(part, max(heavy >> step // rounds, 1), step % rounds, choices)
        state.put(on, part)
        done = part.peak_L <= goal_L[on]
        if done.any():
            on = on[~done]
            part = state.take(on)


def _choices(N: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Sets of slots to be swapped, the heavy rank's and the light one's: one slot each, and two if few."""
    single, double = _single_sets(N), _double_sets(N)
    if not 4 <= N <= 6:
        return [(single, single)]
    # For four slots the sets without slot 0 leave the same two ranks, the other way round.
    return [(single, single), (double[: N - 1] if N == 4 else double, double)]


def _swap_off_heavy(
    part: State, H: int, turn: int, choices: list[tuple[NDArray[np.intp], NDArray[np.intp]]]
) -> None:
    """One swap of each of the H heaviest ranks with one of its M others, where it helps."""
    L, R, N = part.expert_LRN.shape
    M = (R - H) // H
    layer = np.arange(L)[:, None]
    order_LR = order_of(part.load_LR)
    heavy_LH = order_LR[:, ::-1][:, :H]
    light_LHM = np.roll(order_LR[:, : M * H].reshape(L, M, H), turn, axis=2).transpose(0, 2, 1)
    fine_L = FINE / np.maximum(part.peak_L, 1)
    share_LRN = (part.share_LRN * fine_L[:, None, None]).astype(np.int32)
    load_LR = (part.load_LR * fine_L[:, None]).astype(np.int32)
    mine, theirs = share_LRN[layer, heavy_LH], share_LRN[layer[..., None], light_LHM]
    gap_LHM = load_LR[layer, heavy_LH][..., None] - load_LR[layer[..., None], light_LHM]
    found = [_best_of(gap_LHM, mine, theirs, *sets) for sets in choices]
    best = np.stack([gain for gain, _ in found]).argmin(axis=0)
    row, col = np.divmod(np.arange(L * H), H)
    for which, ((my_sets, their_sets), (gain, at)) in enumerate(zip(choices, found, strict=True)):
        own = np.flatnonzero((best == which) & (gain < 0))
        m, mine_at, theirs_at = np.unravel_index(at[own], (M, len(my_sets), len(their_sets)))
        layers = row[own]
        pair = (heavy_LH[layers, col[own]], light_LHM[layers, col[own], m])
        _exchange_sets(part, layers, pair, my_sets[mine_at], their_sets[theirs_at])


def _best_of(
    gap_LHM: NDArray[np.int32],
    mine_LHN: NDArray[np.int32],
    theirs_LHMN: NDArray[np.int32],
    my_sets_KZ: NDArray[np.intp],
    their_sets_JZ: NDArray[np.intp],
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Per heavy rank, twice the change of the larger load of the two, and its flat index in [M, K, J]."""
    mine = 2 * mine_LHN[..., my_sets_KZ].sum(axis=-1, dtype=np.int32)
    theirs = 2 * theirs_LHMN[..., their_sets_JZ].sum(axis=-1, dtype=np.int32) + gap_LHM[..., None]
    change = theirs[..., None, :] - mine[:, :, None, :, None]
    np.abs(change, out=change)
    change -= gap_LHM[..., None, None]
    flat = change.reshape(gap_LHM.shape[0] * gap_LHM.shape[1], -1)
    at = flat.argmin(axis=1)
    return flat[np.arange(len(flat)), at], at


def _exchange_sets(
    part: State,
    row: NDArray[np.intp],
    ranks: tuple[NDArray[np.intp], NDArray[np.intp]],
    mine_XZ: NDArray[np.intp],
    theirs_XZ: NDArray[np.intp],
) -> None:
    """Swap slots of the first rank with the second's, unless an expert met itself or nothing is won."""
    heavy, light = ranks
    at = row[:, None]
    mine, theirs = (
        part.expert_LRN[at, heavy[:, None], mine_XZ],
        part.expert_LRN[at, light[:, None], theirs_XZ],
    )
    meets = _holds(part.expert_LRN[row, light], mine) | _holds(part.expert_LRN[row, heavy], theirs)
    away = part.share_LRN[at, heavy[:, None], mine_XZ].sum(axis=1)
    away -= part.share_LRN[at, light[:, None], theirs_XZ].sum(axis=1)
    before = part.load_LR[row, heavy]
    good = ~meets & (np.maximum(before - away, part.load_LR[row, light] + away) < before)
    for mine_X, theirs_X in zip(mine_XZ[good].T, theirs_XZ[good].T, strict=True):
        exchange(part, row[good], heavy[good], mine_X, light[good], theirs_X)


def _holds(held_XN: NDArray[np.int64], expert_XZ: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [X]: whether a rank holds one of the experts already."""
    same = (held_XN[:, :, None] == expert_XZ[:, None]) & (expert_XZ >= 0)[:, None]
    holds: NDArray[np.bool_] = same.any(axis=(1, 2))
    return holds


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
