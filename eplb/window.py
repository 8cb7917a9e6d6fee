"""LoadWindow: expert loads of past windows, and the best guess of the next one. Pure arithmetic.

A window is a count of routed (token, choice) pairs per layer and expert, real tokens only, summed over
the ranks of one instance. How windows are measured and exchanged is not known here.

Loads may be noise around a fixed mean (long memory predicts best), drift (short memory does), both (a
blend does), or jump when the traffic changes (nothing old is of use). So several memories run side by
side; they and blends of them are judged by how well they predicted the windows that came, and a window
unlike anything before clears them all.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.loads import check_load

MEMORIES = (0.0, 2.0, 8.0, 32.0)  # half-lives, in windows of the size of the first
# Predictors, as weights of the memories: each alone, and the last window blended with the long run.
PREDICTORS = (
    (1.0, 0.0, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 0.0),
    (0.9, 0.0, 0.0, 0.1),
    (0.75, 0.0, 0.0, 0.25),
    (0.5, 0.0, 0.0, 0.5),
    (0.25, 0.0, 0.0, 0.75),
    (0.0, 0.0, 0.0, 1.0),
)
FORGET = 0.3  # weight of the newest window in the errors of prediction
FIRST_JUMP = 0.25  # distance that counts as a jump while nothing is known of the usual one
JUMP = 2.0  # times the usual distance that counts as a jump
LEAST_JUMP = 0.05
# Of a prediction from one window, before another has come: tokens come in sequences, and windows of a hundred
# stray by about 0.3 each (docs/cost-model.md: 0.15 that all share, 2.8 that each adds).
FIRST_ERROR = 0.4
CLEARLY = 0.97  # a shorter memory has to predict this much better than the longest to be believed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWindow:
    """P memories, and Q predictors made of them, of the load of L layers and E experts.

    Distances are total variation, in [0, 1].

    sum_PLE      pairs counted, older ones decayed by the pairs counted since (so idle time forgets nothing)
    error_Q      running mean distance between a predictor's word and the window that came; NaN at first
    windows      windows since the start, or since the last jump
    jumps        how often the load jumped
    unit_pairs   pairs in the first window: the unit of the half-lives
    """

    sum_PLE: NDArray[np.float64]
    error_Q: NDArray[np.float64]
    windows: int = 0
    jumps: int = 0
    unit_pairs: float = 0.0

    @classmethod
    def empty(cls, num_layers: int, num_experts: int) -> Self:
        return cls(
            sum_PLE=np.zeros((len(MEMORIES), num_layers, num_experts)),
            error_Q=np.full(len(PREDICTORS), np.nan),
        )

    def observe(self, pairs_LE: ArrayLike) -> Self:
        """The window with one more measurement, [L, E] pairs; one without pairs changes nothing.

        Raises BalanceError for a wrong shape, and for counts that are negative or not finite.
        """
        pairs = check_load(pairs_LE)
        if pairs.shape != self.sum_PLE.shape[1:]:
            raise BalanceError(f"a window has shape {pairs.shape}, the ones before {self.sum_PLE.shape[1:]}")
        total = float(pairs.sum(axis=1).max())
        if total == 0:
            return self
        unit = self.unit_pairs or total
        if self.windows == 0:
            return replace(
                self, sum_PLE=np.repeat(pairs[None], len(MEMORIES), axis=0), windows=1, unit_pairs=unit
            )
        distance_Q = _distances(self.shares_QLE, pairs)
        usual = float(np.min(self.error_Q))
        limit = FIRST_JUMP if np.isnan(usual) else max(JUMP * usual, LEAST_JUMP)
        if distance_Q.min() > limit:
            jumped = np.repeat(pairs[None], len(MEMORIES), axis=0)
            return replace(self, sum_PLE=jumped, windows=1, jumps=self.jumps + 1)
        error_Q = np.where(
            np.isnan(self.error_Q), distance_Q, (1 - FORGET) * self.error_Q + FORGET * distance_Q
        )
        decay_P = np.array([0.5 ** (total / (unit * half)) if half else 0.0 for half in MEMORIES])
        return replace(
            self,
            sum_PLE=self.sum_PLE * decay_P[:, None, None] + pairs,
            error_Q=error_Q,
            windows=self.windows + 1,
            unit_pairs=unit,
        )

    @property
    def shares_QLE(self) -> NDArray[np.float64]:
        """float64 [Q, L, E]: each predictor's word on the experts' shares of a layer's pairs."""
        total = self.sum_PLE.sum(axis=2, keepdims=True)
        share_PLE = self.sum_PLE / np.where(total > 0, total, 1)
        return np.stack([sum(w * share_PLE[p] for p, w in enumerate(mix) if w) for mix in PREDICTORS])

    @property
    def best(self) -> int:
        """The predictor that has been nearest; the longest memory unless another is clearly better."""
        longest = len(PREDICTORS) - 1
        if self.windows <= 1 or np.isnan(self.error_Q).any():  # all say the same
            return longest
        nearest = int(self.error_Q.argmin())
        return nearest if self.error_Q[nearest] < CLEARLY * self.error_Q[longest] else longest

    @property
    def steady(self) -> bool:
        """Whether the load looks like noise around a fixed mean: the long run predicts best."""
        return self.best == len(PREDICTORS) - 1

    @property
    def load_LE(self) -> NDArray[np.float64]:
        """float64 [L, E]: the predicted load, each layer summing to `unit_pairs` (0 if it had no pairs)."""
        load: NDArray[np.float64] = self.shares_QLE[self.best] * self.unit_pairs
        return load

    @property
    def estimate_error(self) -> float:
        """Relative standard error of `load_LE` itself, about: what one window's noise leaves in n of them.

        The error of a prediction has two halves: the noise of the window to come and of those it rests on.
        """
        return self.uncertainty / float(np.sqrt(2 * max(self.windows, 1)))

    @property
    def uncertainty(self) -> float:
        """Relative standard error of an expert's load in the next window, as it has been so far.

        Independent normal errors s make a mean distance of s / sqrt(2 pi). Before there is a prediction to
        judge, FIRST_ERROR or that of counting, if it is larger.
        """
        usual = float(np.min(self.error_Q))
        if not np.isnan(usual):
            return usual * float(np.sqrt(2 * np.pi))
        if self.windows == 0:
            return 0.0
        share = self.load_LE / max(self.unit_pairs, 1e-300)
        counting = np.sqrt(share / max(self.unit_pairs, 1e-300)).sum(axis=1).mean()
        return max(FIRST_ERROR, float(counting))


def _distances(shares_QLE: NDArray[np.float64], pairs_LE: NDArray[np.float64]) -> NDArray[np.float64]:
    """[Q]: mean over the layers with load of the total variation distance of each word from the load."""
    total = pairs_LE.sum(axis=1, keepdims=True)
    known = (total[:, 0] > 0) & (shares_QLE.sum(axis=(0, 2)) > 0)
    if not known.any():
        return np.zeros(len(shares_QLE))
    came = pairs_LE[known] / total[known]
    distance_Q: NDArray[np.float64] = np.abs(shares_QLE[:, known] - came).sum(axis=2).mean(axis=1) / 2
    return distance_Q
