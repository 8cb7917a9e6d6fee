"""The plan under construction: which expert sits in which slot, and what every rank carries.

L layers, E experts, R ranks, N slots of a rank. All loads are whole units (see `loads`), held in
float64. Layers are independent of each other: whatever is done to one never looks at another.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class State:
    """A plan of some layers, changed in place by the search.

    expert_LRN  int64, -1 empty
    share_LRN   units each slot carries, 0 where empty: equal split, rounded down, until it is levelled
    load_LR     their sums over a rank's slots
    units_LE    load of each expert
    count_LE    replicas of each expert
    """

    expert_LRN: NDArray[np.int64]
    share_LRN: NDArray[np.float64]
    load_LR: NDArray[np.float64]
    units_LE: NDArray[np.float64]
    count_LE: NDArray[np.int64]

    @classmethod
    def of(cls, expert_LRN: NDArray[np.int64], units_LE: NDArray[np.float64]) -> "State":
        """The state of a table of experts; every expert must be in it."""
        L, E = units_LE.shape
        flat = np.where(expert_LRN >= 0, expert_LRN, E) + (np.arange(L) * (E + 1))[:, None, None]
        count = np.bincount(flat.reshape(-1), minlength=L * (E + 1)).reshape(L, E + 1)[:, :E]
        share_LE = np.floor(units_LE / np.maximum(count, 1))
        padded = np.concatenate([share_LE, np.zeros((L, 1))], axis=1)
        share = padded.reshape(-1)[flat]
        return cls(expert_LRN.astype(np.int64), share, share.sum(axis=2), units_LE, count)

    def take(self, layers: NDArray[np.intp]) -> "State":
        """A copy of some layers."""
        return State(
            self.expert_LRN[layers],
            self.share_LRN[layers],
            self.load_LR[layers],
            self.units_LE[layers],
            self.count_LE[layers],
        )

    def put(self, layers: NDArray[np.intp], other: "State") -> None:
        """Write `other`'s layers back to where `take` had them from."""
        self.expert_LRN[layers] = other.expert_LRN
        self.share_LRN[layers] = other.share_LRN
        self.load_LR[layers] = other.load_LR
        self.count_LE[layers] = other.count_LE

    @property
    def peak_L(self) -> NDArray[np.float64]:
        peak: NDArray[np.float64] = self.load_LR.max(axis=1)
        return peak
