"""Proven lower bounds on the largest rank load of a layer, for any split of replicas, equal or not.

R ranks of N slots hold at most S replicas of E experts. Let T be the largest rank load of some plan.

mean      T >= total load / R.
replicas  an expert of load w needs at least ceil(w / T) replicas, together at most S.
crowding  an expert of load w = (d - 1) T + r, 0 < r <= T, has d = ceil(w / T) parts: d - 1 of T and a
          remainder r. Let H be the j experts with the largest remainders (they leave least room), or the
          j hottest if the others have one part each; n the number of ranks that hold one of H, D the
          parts of all other experts. These need D replicas at least, so n <= S - D. On the other R - n
          ranks they have (R - n) N slots at most, each of which takes one part off them at most; so on
          the n ranks remain at least the q = D - (R - n) N smallest parts. Hence n T >= load of H +
          these. If no n fits, no plan reaches T.

The first two are closed; for the third T is found by bisection, and the bound is the last refuted T.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

REASONS = ("mean", "replicas", "crowding")
SLACK = 1e-12  # relative; a refutation has to be clearer than rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`units_L` float64 [L], and which argument gave it: index into REASONS, int64 [L]."""

    units_L: NDArray[np.float64]
    reason_L: NDArray[np.int64]


def lower_bound(
    units_LE: NDArray[np.float64],
    least_share_L: NDArray[np.float64],
    peak_L: NDArray[np.float64],
    *,
    ranks: int,
    slots_per_rank: int,
    slots: int,
    steps: int,
) -> Bound:
    """Bound the largest rank load from below.

    least_share_L  the smallest possible largest share of a replica (see `replica_counts`)
    peak_L         the load of a known plan; only layers where it is above the closed bounds are bisected
    """
    mean_L = units_LE.sum(axis=1) / ranks
    units_L = np.maximum(mean_L, least_share_L)
    reason_L = np.where(least_share_L > mean_L, 1, 0)
    open_L = np.flatnonzero(peak_L > units_L * (1 + 1e-3))
    if len(open_L) and slots_per_rank > 1:
        low_L, high_L = units_L[open_L], peak_L[open_L]
        crowd = _Crowd(units_LE[open_L], ranks, slots_per_rank, slots)
        for _ in range(steps):
            middle_L = (low_L + high_L) / 2
            refuted_L = crowd.refutes(middle_L)
            low_L = np.where(refuted_L, middle_L, low_L)
            high_L = np.where(refuted_L, high_L, middle_L)
        reason_L[open_L] = np.where(low_L > units_L[open_L], 2, reason_L[open_L])
        units_L[open_L] = low_L
    return Bound(units_L=units_L, reason_L=reason_L)


class _Crowd:
    """The crowding argument for given T, all layers and all j at once."""

    def __init__(self, units_LE: NDArray[np.float64], ranks: int, slots_per_rank: int, slots: int) -> None:
        self.R, self.N, self.S = ranks, slots_per_rank, slots
        self.units_LE = units_LE
        self.by_load_LE = units_LE.argsort(axis=1, kind="stable")

    def refutes(self, T_L: NDArray[np.float64]) -> NDArray[np.bool_]:
        """bool [L]: proven that no plan of the layer has a peak of T or less."""
        parts_LE = np.maximum(np.ceil(self.units_LE / T_L[:, None] - SLACK), 1.0)
        rest_LE = self.units_LE - (parts_LE - 1) * T_L[:, None]
        by_rest = ~self._fits(T_L, parts_LE, rest_LE, rest_LE.argsort(axis=1, kind="stable"))
        by_load = ~self._fits(T_L, parts_LE, rest_LE, self.by_load_LE)
        # By load, the others' smallest parts are sorted only as long as each has one part.
        one_part = np.arange(self.units_LE.shape[1]) <= (parts_LE == 1).sum(axis=1)[:, None]
        refuted: NDArray[np.bool_] = by_rest.any(axis=1) | (by_load & one_part).any(axis=1)
        return refuted

    def _fits(
        self,
        T_L: NDArray[np.float64],
        parts_LE: NDArray[np.float64],
        rest_LE: NDArray[np.float64],
        order_LE: NDArray[np.intp],
    ) -> NDArray[np.bool_]:
        """bool [L, E]: whether some n fits when H are all but the first i experts of the order."""
        R, N, S = self.R, self.N, self.S
        L, E = self.units_LE.shape
        zero = np.zeros((L, 1))
        light_LE1 = _running(np.take_along_axis(rest_LE, order_LE, axis=1))
        parts_LE1 = _running(np.take_along_axis(parts_LE, order_LE, axis=1))
        load = np.take_along_axis(self.units_LE, order_LE, axis=1)
        heavy_LE1 = np.concatenate([load[:, ::-1].cumsum(axis=1)[:, ::-1], zero], axis=1)
        most_LE1 = np.minimum(S - parts_LE1, R)  # ranks that can hold one of H
        # n T - heavy - light[q(n)] is concave in n: it is largest at `most`, or where N more of the
        # smallest parts outweigh T, whichever comes first.
        step = np.full((L, E + 1), np.inf)
        if E >= N:
            step[:, : E - N + 1] = light_LE1[:, N:] - light_LE1[:, : E - N + 1]
        turn_L1 = (step > T_L[:, None]).argmax(axis=1)[:, None]
        fits_LE1 = np.zeros((L, E + 1), bool)
        for whole in (np.floor, np.ceil):
            n = np.minimum(most_LE1, np.maximum(whole(R - (parts_LE1 - turn_L1) / N), 0))
            q = np.clip(parts_LE1 - (R - n) * N, 0, np.arange(E + 1)).astype(np.int64)
            load_there = heavy_LE1 + np.take_along_axis(light_LE1, q, axis=1)
            fits_LE1 |= n * T_L[:, None] * (1 + SLACK) >= load_there
        return fits_LE1[:, :E]


def _running(values_LE: NDArray[np.float64]) -> NDArray[np.float64]:
    """[L, E + 1]: the sum of the first i values."""
    return np.concatenate([np.zeros((len(values_LE), 1)), values_LE.cumsum(axis=1)], axis=1)
