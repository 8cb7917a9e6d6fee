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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.order import order_of, pick

REASONS = ("mean", "replicas", "crowding")
LEAST_GAIN = 1e-3  # by which crowding has to raise the bound to be searched for, relative
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
    tolerance: float = 0.0,
) -> Bound:
    """Bound the largest rank load from below.

    least_share_L  the smallest possible largest share of a replica (see `replica_counts`)
    peak_L         the load of a known plan
    tolerance      relative: where the peak is this near the closed bounds, no better one is searched for
    """
    mean_L = units_LE.sum(axis=1) / ranks
    units_L = np.maximum(mean_L, least_share_L)
    reason_L = np.where(least_share_L > mean_L, 1, 0)
    open_L = np.flatnonzero(peak_L > units_L * (1 + max(tolerance, LEAST_GAIN)))
    if len(open_L) and slots_per_rank > 1:
        crowd = _Crowd(units_LE, ranks, slots_per_rank, slots)
        for refutes in (crowd.refutes_by_rest, crowd.refutes_by_load):
            _raise(units_L, reason_L, peak_L, open_L, steps, refutes)
    return Bound(units_L=units_L, reason_L=reason_L)


def _raise(
    low_L: NDArray[np.float64],
    reason_L: NDArray[np.int64],
    peak_L: NDArray[np.float64],
    layers: NDArray[np.intp],
    steps: int,
    refutes: Callable[[NDArray[np.float64], NDArray[np.intp]], NDArray[np.bool_]],
) -> None:
    """Raise the bounds, in place, of the layers where the argument refutes more than they do."""
    least = np.ceil(low_L[layers] * (1 + LEAST_GAIN))
    more = refutes(least, layers)
    layers, low, high = layers[more], least[more], peak_L[layers[more]]
    for _ in range(steps if len(layers) else 0):
        middle = np.ceil((low + high) / 2)
        refuted = refutes(middle, layers)
        low, high = np.where(refuted, middle, low), np.where(refuted, high, middle)
    low_L[layers], reason_L[layers] = low, 2


class _Crowd:
    """The crowding argument for given T, of many layers and all j at once. T is a whole number."""

    def __init__(self, units_LE: NDArray[np.float64], ranks: int, slots_per_rank: int, slots: int) -> None:
        self.R, self.N, self.S = ranks, slots_per_rank, slots
        self.units_LE = units_LE
        self.by_load_LE = order_of(units_LE)

    def refutes_by_rest(self, T_L: NDArray[np.float64], layers: NDArray[np.intp]) -> NDArray[np.bool_]:
        """bool, an entry per given layer: proven that no plan of it has a peak of T or less."""
        parts_LE, rest_LE = self._parts(T_L, layers)
        fits_LE = self._fits(T_L, parts_LE, rest_LE, order_of(rest_LE))
        refuted_L: NDArray[np.bool_] = np.logical_or.reduce(~fits_LE, axis=1)
        return refuted_L

    def refutes_by_load(self, T_L: NDArray[np.float64], layers: NDArray[np.intp]) -> NDArray[np.bool_]:
        """The same with H the hottest experts."""
        parts_LE, rest_LE = self._parts(T_L, layers)
        fits_LE = self._fits(T_L, parts_LE, rest_LE, self.by_load_LE[layers])
        # The others' smallest parts are sorted by load only as long as each has one part.
        fits_LE |= np.arange(rest_LE.shape[1]) > (parts_LE == 1).sum(axis=1)[:, None]
        refuted_L: NDArray[np.bool_] = np.logical_or.reduce(~fits_LE, axis=1)
        return refuted_L

    def _parts(
        self, T_L: NDArray[np.float64], layers: NDArray[np.intp]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How many parts each expert has, and what the last of them carries."""
        units_LE, T_L1 = self.units_LE[layers], T_L[:, None]
        parts_LE = np.maximum(np.ceil(units_LE / T_L1 - SLACK), 1.0)
        return parts_LE, units_LE - (parts_LE - 1) * T_L1

    def _fits(
        self,
        T_L: NDArray[np.float64],
        parts_LE: NDArray[np.float64],
        rest_LE: NDArray[np.float64],
        order_LE: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """bool [L, E]: whether some n fits when H are all but the first i experts of the order."""
        R, N, S = self.R, self.N, self.S
        L, E = rest_LE.shape
        i_E1, T_L1 = np.arange(E + 1), T_L[:, None]
        light_LE1 = _running(pick(rest_LE, order_LE))
        parts_LE1 = _running(pick(parts_LE, order_LE))
        load_LE1 = light_LE1 + (parts_LE1 - i_E1) * T_L1.astype(np.int64)
        heavy_LE1 = load_LE1[:, -1:] - load_LE1
        most_LE1 = np.minimum(S - parts_LE1, R)  # ranks that can hold one of H
        # n T - heavy - light[q(n)] is concave in n: it is largest at `most`, or where N more of the
        # smallest parts outweigh T, whichever comes first.
        outweighs = np.ones((L, E + 1), bool)
        if E >= N:
            outweighs[:, : E - N + 1] = light_LE1[:, N:] - light_LE1[:, : E - N + 1] > T_L1
        over_LE1 = outweighs.argmax(axis=1)[:, None] - parts_LE1
        n = np.minimum(np.maximum(R + over_LE1 // N, 0), most_LE1)
        q = np.minimum(np.maximum(parts_LE1 - (R - n) * N, 0), i_E1)
        room_L1 = T_L1 * (1 + SLACK)
        fits_LE1: NDArray[np.bool_] = n * room_L1 >= heavy_LE1 + pick(light_LE1, q)
        layer, i = np.nonzero(~fits_LE1)  # few: the next larger n for those
        n = np.minimum(np.maximum(R - -over_LE1[layer, i] // N, 0), most_LE1[layer, i])
        q = np.clip(parts_LE1[layer, i] - (R - n) * N, 0, i)
        fits_LE1[layer, i] = n * room_L1[layer, 0] >= heavy_LE1[layer, i] + light_LE1[layer, q]
        return fits_LE1[:, :E]


def _running(whole_LE: NDArray[np.float64]) -> NDArray[np.int64]:
    """[L, E + 1]: the sum of the first i values. Integers are added up several times as fast."""
    out = np.zeros((len(whole_LE), whole_LE.shape[1] + 1), np.int64)
    np.cumsum(whole_LE.astype(np.int64), axis=1, out=out[:, 1:])
    return out
