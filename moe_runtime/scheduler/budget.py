"""ChunkBudget: how many prefill rows fit into a step that must not take too long. Pure.

Times are arguments. The cost of a step is learned as seconds = a + b * decode rows + c * prefill rows,
least squares over the latest steps (each step's weight fades by `FADE` per step), with the rows of the
fullest rank, since lock-step makes everybody wait for it.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FADE = 0.98
AIM = 0.8
SHARE = 0.25
LEAST_STEPS = 3


@dataclass(slots=True)
class ChunkBudget:
    """`target` seconds a step may take while somebody decodes; a budget is never under `least` rows.

    It aims at `AIM` of the target, so that most steps keep to it though times vary.

    Where prefill rows seem to cost nothing a step gets twice as many as before.

    A prefill always gets `SHARE` of the time that decoding takes, or the least, whatever the target: that
    bounds its delay where even decoding alone misses the target, and costs the decoding little.
    """

    target: float
    least: int = 16
    _moments: NDArray[np.float64] = field(default_factory=lambda: np.diag([1e-9, 1e-6, 1e-6]))
    _sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    _prefills: int = 0

    def observe(self, *, decode_rows: int, prefill_rows: int, seconds: float) -> None:
        """A step took `seconds`."""
        x = np.array([1.0, decode_rows, prefill_rows])
        self._moments = FADE * self._moments + np.outer(x, x)
        self._sums = FADE * self._sums + x * seconds
        self._prefills += prefill_rows > 0

    def rows(self, decode_rows: int) -> int | None:
        """Prefill rows that fit beside `decode_rows`; None: as many as there are.

        None when nobody decodes here, and until a few steps with prefill have been seen.
        """
        if not decode_rows or self._prefills < LEAST_STEPS:
            return None
        # A little weight on the diagonal keeps rows that never varied from being given any sign.
        ridge = np.diag(self._moments.diagonal() * 1e-6 + 1e-9)
        constant, per_decode, per_prefill = np.linalg.solve(self._moments + ridge, self._sums)
        if per_prefill <= 0:
            # Rows that seem to cost nothing, for they are cheap or the times vary: twice as many will tell.
            usual = self._moments[2, 2] / self._moments[0, 2]
            return max(self.least, int(2 * usual))
        decoding = max(0.0, constant + per_decode * decode_rows)
        room = max(AIM * self.target - decoding, SHARE * decoding)
        return max(self.least, int(room / per_prefill))
