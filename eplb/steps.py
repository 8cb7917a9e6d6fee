"""One change of a plan off its heaviest ranks: a swap of slots, or a replica handed to another expert.

All layers at once, each on its own. Nothing is known here of what moving costs.
"""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.search import exchange
from moe_runtime.eplb.state import State


def step(part: State, slots: int, weighted: bool) -> NDArray[np.bool_]:
    """One change off each layer's heaviest rank, the one that gains most per move; says where."""
    L, R, N = part.expert_LRN.shape
    layer = np.arange(L)
    peak_rank = part.load_LR.argmax(axis=1)
    peak_L = part.load_LR[layer, peak_rank]
    swap_L, swap_at = _best_swap(part, peak_rank)
    hand_L, hand_at = _best_handover(part, peak_rank, slots, weighted)
    swap_gain, hand_gain = (peak_L - swap_L) / 2, peak_L - hand_L
    hand = (hand_gain > 0) & (hand_gain >= swap_gain)
    swap = (swap_gain > 0) & ~hand
    row = np.flatnonzero(swap)
    mine, rank, theirs = np.unravel_index(swap_at[row], (N, R, N))
    exchange(part, row, peak_rank[row], mine, rank, theirs)
    row = np.flatnonzero(hand)
    if len(row):
        mine, rank, theirs = np.unravel_index(hand_at[row], (N, R, N))
        _hand_over(part, row, (peak_rank[row], mine), (rank, theirs), weighted)
    changed: NDArray[np.bool_] = swap | hand
    row = np.flatnonzero(~changed)
    if len(row):
        changed[row] = _trade_replicas(part, row, peak_rank[row], weighted)
    return changed


def _trade_replicas(
    part: State, row: NDArray[np.intp], peak_rank: NDArray[np.intp], weighted: bool
) -> NDArray[np.bool_]:
    """Where no single change helps, better counts: the next steps have to find partners that fit them.

    The expert of the heaviest rank with the largest mean share gets a replica of the one that could
    spare it best, if even without it that one's mean share stays below. Says where that was so.
    """
    layer = np.arange(len(row))
    load, count, table = part.units_LE[row], part.count_LE[row], part.expert_LRN[row]
    mine = table[layer, peak_rank]
    share = np.where(mine >= 0, (load / np.maximum(count, 1))[layer[:, None], np.maximum(mine, 0)], -1.0)
    slot = share.argmax(axis=1)
    taker = mine[layer, slot]
    spare = np.where(count > 1, load / np.maximum(count - 1, 1), np.inf)
    spare[layer, taker] = np.inf
    has = (table == taker[:, None, None]).any(axis=2)
    usable = np.zeros_like(count)  # replicas of each expert on ranks that could take the taker
    at = (table >= 0) & ~has[:, :, None]
    np.add.at(usable, (np.nonzero(at)[0], table[at]), 1)
    spare[usable == 0] = np.inf
    giver = spare.argmin(axis=1)
    good: NDArray[np.bool_] = spare[layer, giver] < share[layer, slot]
    left = part.load_LR[row][:, :, None] - part.share_LRN[row]
    left[(table != giver[:, None, None]) | has[:, :, None]] = np.inf
    rank, place = np.unravel_index(left.reshape(len(row), -1).argmin(axis=1), left.shape[1:])
    if good.any():
        _hand_over(part, row[good], (peak_rank[good], slot[good]), (rank[good], place[good]), weighted)
    return good


def _best_swap(part: State, peak_rank: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """The smallest larger load of the two ranks after a swap off the peak, and its flat index."""
    L = len(peak_rank)
    layer = np.arange(L)
    mine, share = part.expert_LRN[layer, peak_rank], part.share_LRN[layer, peak_rank]
    away = share[:, :, None, None] - part.share_LRN[:, None]
    peak = part.load_LR[layer, peak_rank][:, None, None, None]
    worse = np.maximum(peak - away, part.load_LR[:, None, :, None] + away)
    same = (mine[:, :, None, None] == part.expert_LRN[:, None]) & (mine[:, :, None, None] >= 0)
    worse[np.broadcast_to(same.any(axis=3)[..., None] | same.any(axis=1)[:, None], worse.shape)] = np.inf
    flat = worse.reshape(L, -1)
    at = flat.argmin(axis=1)
    return flat[layer, at], at


def _best_handover(
    part: State, peak_rank: NDArray[np.intp], slots: int, weighted: bool
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """The best new replica of an expert of the heaviest rank, in a slot that is empty or another's replica.

    Returns the largest load the change leaves on the ranks it touches, and its flat index
    (slot of the peak rank, rank, slot there).
    """
    L, R, N = part.expert_LRN.shape
    layer = np.arange(L)
    mine, my_share = part.expert_LRN[layer, peak_rank], part.share_LRN[layer, peak_rank]
    peak = part.load_LR[layer, peak_rank][:, None, None, None]
    room = (part.count_LE.sum(axis=1) < slots)[:, None, None]
    count = np.where(
        part.expert_LRN >= 0,
        np.take_along_axis(part.count_LE, part.expert_LRN.reshape(L, -1), 1).reshape(L, R, N),
        0,
    )
    other_LRN = _others_load(part, weighted, count)
    free = np.where(part.expert_LRN < 0, room, count > 1)
    left = (part.load_LR[:, :, None] - part.share_LRN)[:, None]
    if weighted:
        give = np.minimum(my_share[:, :, None, None], np.floor(np.maximum(peak - left, 0) / 2))
        heavy, light = peak - give, left + give
    else:
        c = np.take_along_axis(part.count_LE, np.maximum(mine, 0), axis=1)
        units = np.take_along_axis(part.units_LE, np.maximum(mine, 0), axis=1)
        new = np.floor(units / (c + 1))
        heavy = peak - (my_share - new)[:, :, None, None]
        light = left + new[:, :, None, None]
    worse = np.maximum(np.maximum(heavy, light), other_LRN[:, None])
    present = (mine[:, :, None, None] == part.expert_LRN[:, None]).any(axis=3)
    worse[
        np.broadcast_to(present[..., None] | ~free[:, None] | (mine < 0)[:, :, None, None], worse.shape)
    ] = np.inf
    flat = worse.reshape(L, -1)
    at = flat.argmin(axis=1)
    return flat[layer, at], at


def _others_load(part: State, weighted: bool, count: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L, R, N]: the load of the ranks that suffer when a slot's replica goes: its expert's other ranks.

    Weighted, the share is poured over them until they stand level; with equal split the heaviest counts.
    """
    L, R, N = part.expert_LRN.shape
    out = np.zeros((L, R, N))
    layer, rank, slot = np.nonzero(count > 1)
    if not len(layer):
        return out
    key = layer * part.units_LE.shape[1] + part.expert_LRN[layer, rank, slot]
    order = np.lexsort((part.load_LR[layer, rank], key))
    layer, rank, slot, key = layer[order], rank[order], slot[order], key[order]
    load, share = part.load_LR[layer, rank], part.share_LRN[layer, rank, slot]
    times = count[layer, rank, slot]
    first = np.repeat(np.flatnonzero(np.diff(key, prepend=-1)), times[np.diff(key, prepend=-1) != 0])
    place = np.arange(len(key)) - first
    if weighted:
        below = load.cumsum() - (load.cumsum() - load)[first]  # of the expert's ranks up to this one
        value = np.full(len(key), np.inf)
        for m in range(1, int(times.max())):  # poured over the m lightest others
            own = place < m  # among the m + 1 lightest
            at = np.minimum(first + np.where(own, m, m - 1), len(key) - 1)
            level = (share + below[at] - np.where(own, load, 0)) / m
            value = np.where(m < times, np.minimum(value, level), value)
    else:
        last = first + times - 1
        value = np.where(np.arange(len(key)) == last, load[last - 1], load[last])
        value = value + np.floor(share / (times - 1))
    out[layer, rank, slot] = value
    return out


def _hand_over(
    part: State,
    row: NDArray[np.intp],
    source: tuple[NDArray[np.intp], NDArray[np.intp]],
    target: tuple[NDArray[np.intp], NDArray[np.intp]],
    weighted: bool,
) -> None:
    """Put the expert of `source` (rank, slot) into `target` too; what was there gives up that replica."""
    rank, slot = target
    taker = part.expert_LRN[row, source[0], source[1]]
    giver = part.expert_LRN[row, rank, slot]
    lost = giver >= 0
    part.expert_LRN[row, rank, slot] = taker
    if not weighted:
        part.put(row, State.of(part.expert_LRN[row], part.units_LE[row]))
        return
    part.count_LE[row, taker] += 1
    part.count_LE[row[lost], giver[lost]] -= 1
    share = part.share_LRN[row, rank, slot].copy()
    part.load_LR[row, rank] -= share
    part.share_LRN[row, rank, slot] = 0
    # The orphaned share goes to the giver's lightest other rank; levelling follows.
    for i in np.flatnonzero(lost):
        ranks, places = np.nonzero(part.expert_LRN[row[i]] == giver[i])
        k = part.load_LR[row[i], ranks].argmin()
        part.share_LRN[row[i], ranks[k], places[k]] += share[i]
        part.load_LR[row[i], ranks[k]] += share[i]
    give = np.minimum(
        part.share_LRN[row, source[0], source[1]],
        np.floor(np.maximum(part.load_LR[row, source[0]] - part.load_LR[row, rank], 0) / 2),
    )
    part.share_LRN[row, source[0], source[1]] -= give
    part.load_LR[row, source[0]] -= give
    part.share_LRN[row, rank, slot] += give
    part.load_LR[row, rank] += give
