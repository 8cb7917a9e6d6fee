"""Better replica counts for two slots a rank, where packing is solved and only the counts are open.

Sorted by share, the heaviest replica meets the lightest, the second heaviest the second lightest: no
other pairing has a smaller peak. So a set of counts is judged by one sort, and the search passes
replicas from one expert to another while that lowers the excess over the goal. All layers at once, each on
its own.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.order import order_of
from moe_runtime.eplb.pack import heaviest_first

FINE = float(1 << 20)  # shares are compared in 2^-20 of the goal: squares of their sums add up exactly
MOST = float(1 << 29)  # and held in 32 bits, as is the sum of two
BLOCK = 1 << 15  # shares sorted together: their arrays stay in the cache
NEVER = float(1 << 52)  # above every share


def better_counts(
    units_LE: NDArray[np.float64],
    count_LE: NDArray[np.int64],
    goal_L: NDArray[np.float64],
    *,
    ranks: int,
    rounds: int,
    givers: int,
    patience: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts [L, E] whose best pairing on R ranks has a peak no higher, and lower where the search finds how.

    With them that peak, [L]. Each round gives a replica to an expert of the heaviest pair and takes one from
    the expert where that hurts least, of the `givers` whose shares would be smallest without it. A layer ends
    at its goal, or when no exchange lowers the sum over ranks of squared excess above the goal, not even for
    the next `patience` pairs.
    """
    R = ranks
    best_LE, count_LE = count_LE.copy(), count_LE.copy()
    lowest_L = np.full(len(units_LE), np.inf)
    skip_L = np.zeros(len(units_LE), np.int64)  # pairs tried in vain since the last exchange
    on = np.arange(len(units_LE))
    for turn in range(rounds + 1):
        units, count, goal = units_LE[on], count_LE[on], goal_L[on]
        item, share = heaviest_first(units, count, 2 * R)
        sums = share[:, :R] + share[:, : R - 1 : -1]
        peak = sums.max(axis=1)
        lower = peak < lowest_L[on]
        best_LE[on[lower]], lowest_L[on[lower]] = count[lower], peak[lower]
        go = np.flatnonzero((peak > goal) & (skip_L[on] <= min(patience, R - 1)))
        if turn == rounds or not len(go):
            break
        on = on[go]
        at = R - 1 - order_of(-sums[go, ::-1])[np.arange(len(go)), skip_L[on]][:, None]
        pair = np.concatenate([at, 2 * R - 1 - at], axis=1)
        row, taker, giver = _best_exchanges(units[go], count[go], goal[go], item[go], share[go], pair, givers)
        skip_L[on] += 1
        skip_L[on[row]] = 0
        count_LE[on[row], taker] += 1
        count_LE[on[row], giver] -= 1
    return best_LE, lowest_L


def _best_exchanges(
    units_LE: NDArray[np.float64],
    count_LE: NDArray[np.int64],
    goal_L: NDArray[np.float64],
    item_LS: NDArray[np.int64],
    share_LS: NDArray[np.float64],
    pair_LP: NDArray[np.int64],
    givers: int,
) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]:
    """The taker, of those in the two slots `pair_LP`, and giver that lower the excess most.

    Given for the layers (the first array) in which one lowers it.
    """
    L, S = item_LS.shape
    layer = np.arange(L)
    fine_L1 = (FINE / np.maximum(goal_L, 1))[:, None]
    # Takers P, and givers G that could spare a replica best.
    taker_LP = item_LS[layer[:, None], pair_LP]
    can_LP = (taker_LP >= 0) & (count_LE[layer[:, None], taker_LP] < S // 2)
    grown_LE = np.where(count_LE > 1, np.floor(units_LE / np.maximum(count_LE - 1, 1)), NEVER)
    giver_LG = order_of(grown_LE)[:, :givers]
    can_LPG = can_LP[:, :, None] & (count_LE[layer[:, None], giver_LG] > 1)[:, None]
    can_LPG &= giver_LG[:, None] != taker_LP[:, :, None]
    row, p, g = np.nonzero(can_LPG)
    if not len(row):
        return row, row, row
    taker, giver = taker_LP[row, p], giver_LG[row, g]
    shrunk = _fine(units_LE[row, taker] / (count_LE[row, taker] + 1), fine_L1[row, 0])
    grown = _fine(grown_LE[row, giver], fine_L1[row, 0])
    fine_LS = _fine(share_LS[:, ::-1], fine_L1)  # lightest first, as sorted below
    item_LS = item_LS[:, ::-1].astype(np.int16 if units_LE.shape[1] < 1 << 15 else np.int64)
    excess_LPG = np.full(can_LPG.shape, np.inf)
    block = max(1, BLOCK // S)
    for begin in range(0, len(row), block):
        some = slice(begin, begin + block)
        after_XS = fine_LS[row[some]]
        _exchange(after_XS, item_LS[row[some]], (taker[some], shrunk[some]), (giver[some], grown[some]))
        after_XS.sort(axis=1, kind="stable")  # quick, as they are nearly sorted
        excess_LPG[row[some], p[some], g[some]] = _excess(after_XS)
    flat = excess_LPG.reshape(L, -1)
    k = flat.argmin(axis=1)
    good = np.flatnonzero(flat[layer, k] < _excess(fine_LS))
    p, g = np.divmod(k[good], can_LPG.shape[2])
    return good, taker_LP[good, p], giver_LG[good, g]


def _exchange(
    share_XS: NDArray[np.int32],
    item_XS: NDArray[np.integer],
    taker: tuple[NDArray[np.int64], NDArray[np.int32]],
    giver: tuple[NDArray[np.int64], NDArray[np.int32]],
) -> None:
    """Shares after an exchange, in place: the giver's slots grow, the taker's shrink, one slot changes hands.

    taker, giver  the experts and their new shares
    """
    mine_XS = item_XS == giver[0].astype(item_XS.dtype)[:, None]
    np.copyto(share_XS, giver[1][:, None], where=mine_XS)
    np.copyto(share_XS, taker[1][:, None], where=item_XS == taker[0].astype(item_XS.dtype)[:, None])
    share_XS[np.arange(len(share_XS)), mine_XS.argmax(axis=1)] = taker[1]


def _fine(share: NDArray[np.float64], fine: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.minimum(share * fine, MOST).astype(np.int32)


def _excess(ordered_XS: NDArray[np.int32]) -> NDArray[np.float64]:
    """Sum over the ranks of squared excesses above the goal, an exact integer."""
    R = ordered_XS.shape[1] // 2
    over_XR = ordered_XS[:, :R] + ordered_XS[:, : R - 1 : -1]
    over_XR -= np.int32(FINE)
    np.maximum(over_XR, 0, out=over_XR)
    square_XR = over_XR.astype(np.float64)
    square_XR *= square_XR
    excess: NDArray[np.float64] = square_XR.sum(axis=1)
    return excess
