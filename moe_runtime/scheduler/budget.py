"""How many prefill rows fit into a step that must not take too long. Pure.

`row_cost` and `affordable_rows`: rows with a long context take longer than others, and in lock-step everybody
waits for them. `ChunkBudget`: what a step may take in all.

Times are arguments there. The cost of a step is learned as seconds = a + b * decode rows + c * prefill rows,
least squares over the latest steps (each step's weight fades by `FADE` per step), with the rows of the
fullest rank, since lock-step makes everybody wait for it.
"""

from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import NDArray

FADE = 0.98
AIM = 0.8
SHARE = 0.25
LEAST_STEPS = 3


def row_cost(rows: int, context: int, span: int) -> float:
    """What `rows` prefill rows from position `context` on cost, in rows without context: a row at position
    p costs 1 + p / span. With span 0 all cost 1.
    """
    return rows + rows * (context + (rows - 1) / 2) / span if span else float(rows)


def affordable_rows(budget: float, context: int, span: int) -> int:
    """The most rows from position `context` on whose `row_cost` is within `budget` >= 0."""
    if not span:
        return int(budget)
    # The larger root of n^2 / 2 span + n (1 + (context - 1/2) / span) - budget.
    first = 1 + (context - 0.5) / span
    return int(2 * budget / (first + sqrt(first * first + 2 * budget / span)) + 1e-9)


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
