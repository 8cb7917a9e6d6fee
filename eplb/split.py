"""Split weights: how the replicas of an expert share its load, for a plan whose slots are fixed.

Minimising the largest rank load over the shares is a flow problem. Taking the experts in turn and
levelling each one's load over its ranks (water-filling) descends on the sum of squared rank loads, whose
minimum over the shares also minimises the largest load; so plain sweeps converge to the optimum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    sites = _Sites.of(part)
    for _ in range(sweeps):
        before = part.peak_L
        for k in range(sites.units_LX.shape[1]):
            _level(part, sites, k)
        after = part.peak_L
        done = (after <= goal_L[active]) | (before - after < LEAST_PROGRESS * before)
        if done.any():
            state.put(active, part)
            active = active[~done]
            if not len(active):
                return
            part, sites = state.take(active), sites.take(~done)
    state.put(active, part)


@dataclass(slots=True)
class _Sites:
    """Where the replicated experts of each layer sit: X experts, C replicas, padded.

    units_LX float64, 0 pads; flat_LXC int64: index into the layer's R * N slots, 0 pads; real_LXC bool.
    """

    units_LX: NDArray[np.float64]
    flat_LXC: NDArray[np.int64]
    real_LXC: NDArray[np.bool_]

    @classmethod
    def of(cls, part: State) -> "_Sites":
        L, R, N = part.expert_LRN.shape
        E = part.units_LE.shape[1]
        experts = part.expert_LRN.reshape(L, R * N)
        order = np.where(experts < 0, E, experts).argsort(axis=1, kind="stable")
        first = part.count_LE.cumsum(axis=1) - part.count_LE
        many = part.count_LE > 1
        X, C = int(many.sum(axis=1).max()), int(part.count_LE.max())
        rows, ids = np.nonzero(many)
        place = (many.cumsum(axis=1) - 1)[rows, ids]
        units, flat = np.zeros((L, X)), np.zeros((L, X, C), np.int64)
        real = np.zeros((L, X, C), bool)
        units[rows, place] = part.units_LE[rows, ids]
        counts = part.count_LE[rows, ids]
        real[rows, place] = np.arange(C) < counts[:, None]
        at = np.minimum(first[rows, ids][:, None] + np.arange(C), R * N - 1)
        flat[rows, place] = np.where(real[rows, place], order[rows[:, None], at], 0)
        return cls(units, flat, real)

    def take(self, keep: NDArray[np.bool_]) -> "_Sites":
        return _Sites(self.units_LX[keep], self.flat_LXC[keep], self.real_LXC[keep])


def _level(part: State, sites: _Sites, k: int) -> None:
    """Water-fill the k-th replicated expert of every layer over its ranks, in whole units."""
    L, _, N = part.expert_LRN.shape
    row = np.arange(L)[:, None]
    flat, real, units = sites.flat_LXC[:, k], sites.real_LXC[:, k], sites.units_LX[:, k, None]
    rank, slot = np.divmod(flat, N)
    share = np.where(real, part.share_LRN[row, rank, slot], 0.0)
    base = np.where(real, part.load_LR[row, rank] - share, np.inf)
    ordered = np.sort(base, axis=1)
    levels = (units + ordered.cumsum(axis=1)) / np.arange(1, base.shape[1] + 1)
    # The water stands over the first m ranks, m the last with a level above its own base.
    above = (levels > ordered) & np.isfinite(ordered)
    m = np.maximum(above.sum(axis=1) - 1, 0)
    level = np.where(real[:, :1], levels[np.arange(L), m][:, None], 0.0)
    new = np.maximum(np.floor(level - np.where(real, base, level)), 0.0)
    new[:, 0] += np.where(real[:, 0], units[:, 0] - new.sum(axis=1), 0.0)  # the rounding
    change = np.where(real, new - share, 0.0)
    rows, place = np.nonzero(real)
    part.share_LRN[rows, rank[rows, place], slot[rows, place]] = new[rows, place]
    # Twins (more replicas than ranks) meet on a rank, so additions must accumulate.
    np.add.at(part.load_LR, (rows, rank[rows, place]), change[rows, place])


def cumulative_table(
    expert_LS: NDArray[np.int32], share_LS: NDArray[np.float64], num_experts: int
) -> NDArray[np.uint16]:
    """Shares as `Placement.cumulative_LS`: exclusive starts in 65536ths, every replica at least one.

    Starts are rounded to the nearest 65536th, so a share is off by at most one. Experts whose slots all
    have share 0 are split equally. uint16 [L, S].
    """
    L, S = expert_LS.shape
    key = np.where(expert_LS < 0, num_experts, expert_LS)
    order = key.argsort(axis=1, kind="stable")
    key = np.take_along_axis(key, order, axis=1)
    share = np.take_along_axis(share_LS, order, axis=1)
    offset = np.arange(L)[:, None] * (num_experts + 1)
    size = L * (num_experts + 1)
    count = np.bincount((key + offset).reshape(-1), minlength=size)
    total = np.bincount((key + offset).reshape(-1), weights=share.reshape(-1), minlength=size)
    first = np.cumsum(count) - count  # position of an expert's first slot in the flattened order
    place = np.arange(L * S) - first[(key + offset).reshape(-1)]
    times = count[(key + offset).reshape(-1)]
    whole = total[(key + offset).reshape(-1)]
    running = share.reshape(-1).cumsum() - share.reshape(-1)
    running -= np.repeat(running[np.minimum(first, L * S - 1)], count)
    equal = place / times
    begin = np.where(whole > 0, running / np.where(whole > 0, whole, 1), equal)
    begin = np.rint(begin * FULL_RANGE)
    # Each starts at least one after the one before, and leaves one for each that follows.
    group = (key + offset).reshape(-1) * (4.0 * FULL_RANGE)
    begin = np.maximum.accumulate(begin - place + group) - group + place
    begin = np.minimum(begin, FULL_RANGE - (times - place))
    out = np.zeros((L, S), np.int64)
    np.put_along_axis(out, order, begin.astype(np.int64).reshape(L, S), axis=1)
    return np.where(expert_LS < 0, 0, out).astype(np.uint16)
