"""Better replica counts for two slots a rank, where packing is solved and only the counts are open.

Sorted by share, the heaviest replica meets the lightest, the second heaviest the second lightest: no
other pairing has a smaller peak. So a set of counts is judged by one sort, and the search passes
replicas from one expert to another while that lowers the excess over the goal.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FINE = float(1 << 20)  # excesses are counted in 2^-20 of the goal, so that squares sum exactly


def better_counts(
    units_LE: NDArray[np.float64],
    count_LE: NDArray[np.int64],
    goal_L: NDArray[np.float64],
    *,
    ranks: int,
    budget: int,
) -> NDArray[np.int64]:
    """Counts whose best pairing on R ranks has a peak no higher, and lower where the search finds how.

    Each step gives a replica to an expert of the heaviest pair and takes one from the expert where that
    hurts least. `budget` counts sorted shares per layer; a layer also stops at its goal, or when no
    exchange lowers the sum over ranks of squared excess above the goal.
    """
    out = count_LE.copy()
    for layer in range(len(units_LE)):
        out[layer] = _search(_Layer(units_LE[layer], float(goal_L[layer]), ranks), count_LE[layer], budget)
    return out


@dataclass(frozen=True, slots=True)
class _Layer:
    units_E: NDArray[np.float64]
    goal: float
    ranks: int

    def shares(self, count_E: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Shares and experts of the 2 R slots, lightest first; empty slots have share 0 and expert -1."""
        share_E = np.floor(self.units_E / count_E)
        order = share_E.argsort(kind="stable")
        experts = np.repeat(order, count_E[order])
        holes = 2 * self.ranks - len(experts)
        return (
            np.concatenate([np.zeros(holes), share_E[experts]]),
            np.concatenate([np.full(holes, -1), experts]),
        )

    def excess(self, sums_: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum of squared excesses over the last axis, an exact integer."""
        over = np.floor(np.maximum(sums_ - self.goal, 0) * (FINE / self.goal))
        total: NDArray[np.float64] = np.square(over).sum(axis=-1)
        return total


def _search(layer: _Layer, count_E: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    R = layer.ranks
    count = count_E.copy()
    best, best_peak = count.copy(), np.inf
    while True:
        share, expert = layer.shares(count)
        sums = share[R:] + share[:R][::-1]
        peak = float(sums.max())
        if peak < best_peak:
            best, best_peak = count.copy(), peak
        givers = np.flatnonzero(count > 1)
        budget -= 2 * len(givers) * 2 * R
        if peak <= layer.goal or budget < 0 or not len(givers):
            return best
        at = int(sums.argmax())
        step = _best_exchange(layer, count, share, expert, givers, (R + at, R - 1 - at))
        if step is None:
            return best
        taker, giver = step
        count[taker] += 1
        count[giver] -= 1


def _best_exchange(
    layer: _Layer,
    count: NDArray[np.int64],
    share: NDArray[np.float64],
    expert: NDArray[np.int64],
    givers: NDArray[np.intp],
    places: tuple[int, int],
) -> tuple[int, int] | None:
    """The taker (an expert of the heaviest pair) and giver that lower the excess most, or None."""
    R = layer.ranks
    best, least = None, float(layer.excess(share[R:] + share[:R][::-1]))
    for place in places:
        taker = int(expert[place])
        if taker < 0 or count[taker] >= R:
            continue
        others = givers[givers != taker]
        if not len(others):
            continue
        # The shares as a matrix, a row per giver: its slots grow, the taker's shrink, one slot changes hands.
        shrunk = np.floor(layer.units_E[taker] / (count[taker] + 1))
        grown = np.floor(layer.units_E[others] / (count[others] - 1))
        mine = expert == others[:, None]
        rows = np.where(mine, grown[:, None], np.where(expert == taker, shrunk, share))
        rows[np.arange(len(others)), mine.argmax(axis=1)] = shrunk
        rows.sort(axis=1)
        excess = layer.excess(rows[:, R:] + rows[:, :R][:, ::-1])
        k = int(excess.argmin())
        if excess[k] < least:
            best, least = (taker, int(others[k])), float(excess[k])
    return best
