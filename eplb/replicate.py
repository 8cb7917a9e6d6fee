"""How many replicas each expert gets, before anything is placed."""

import numpy as np
from numpy.typing import NDArray


def replica_counts(units_LE: NDArray[np.float64], total: int, most: int) -> NDArray[np.int64]:
    """Replicas per expert, int64 [L, E], that minimise the largest share of a replica (equal split).

    One replica each, then one at a time to the expert whose replicas carry most, never beyond `most`;
    ties go to the lowest id. Sums to `total` unless every expert has `most`. The greedy choice is
    optimal for this objective: any plan below its largest share needs more replicas.
    """
    L, E = units_LE.shape
    count_LE = _head_start(units_LE, total, most)
    layer = np.arange(L)
    left_L = total - count_LE.sum(axis=1)
    share_LE = np.where(count_LE < most, units_LE / count_LE, -1.0)
    while True:
        heaviest_L = share_LE.argmax(axis=1)
        give_L = (left_L > 0) & (share_LE[layer, heaviest_L] >= 0)
        if not give_L.any():
            return count_LE
        row, col = layer[give_L], heaviest_L[give_L]
        count_LE[row, col] += 1
        left_L[row] -= 1
        given = count_LE[row, col]
        share_LE[row, col] = np.where(given < most, units_LE[row, col] / given, -1.0)


def _head_start(units_LE: NDArray[np.float64], total: int, most: int) -> NDArray[np.int64]:
    """Counts the greedy loop is sure to reach, so that the loop is short when replicas are many."""
    L, E = units_LE.shape
    if total - E <= 64:
        return np.ones((L, E), np.int64)
    # A target share t is safe while its replicas fit: the greedy loop passes through every t it can pay.
    low_L, high_L = np.zeros(L), units_LE.max(axis=1)
    for _ in range(40):
        middle_L = (low_L + high_L) / 2
        need_L = np.minimum(np.ceil(units_LE / middle_L[:, None]), most).sum(axis=1)
        fits_L = need_L <= total
        high_L = np.where(fits_L, middle_L, high_L)
        low_L = np.where(fits_L, low_L, middle_L)
    count_LE: NDArray[np.int64] = np.minimum(np.ceil(units_LE / high_L[:, None]), most).astype(np.int64)
    return count_LE
