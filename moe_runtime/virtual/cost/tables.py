"""Tables of a layer's kernels by the number of rows, so that a step looks them up for all ranks at once.

Owns the grouping of kernels into stages and parts. Built once per deployment (and share of multiprocessors),
grown on demand. N rows of the table: every integer number of tokens from 0 on.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.work import Work

FIRST_SIZE = 1024


class RowWork(NamedTuple):
    """Kernels of one stage at one number of rows: products and streams apart."""

    dense: Work
    other: Work

    @property
    def seconds(self) -> float:
        return float(self.dense.seconds + self.other.seconds)


class RowTables:
    """Seconds by rows: `before` is what a rank computes per layer before its rows leave, but for the core."""

    def __init__(self, kernels: LayerKernels) -> None:
        self.kernels = kernels
        self._grow(FIRST_SIZE)

    def need(self, rows: int) -> None:
        """Make the tables hold `rows`."""
        if rows >= len(self.before_N):
            self._grow(max(rows + 1, 2 * len(self.before_N)))

    def _grow(self, size: int) -> None:
        k, rows_N = self.kernels, np.arange(size, dtype=np.float64)
        work = k.project(rows_N).plus(
            k.output(rows_N), k.router(rows_N), k.stream_first(rows_N), k.stream_second(rows_N)
        )
        self.before_N: NDArray[np.float64] = np.asarray(work.seconds, np.float64)
        absorb: NDArray[np.float64] = np.zeros(size) + k.absorb(rows_N).seconds
        absorb[0] = 0.0
        self.absorb_N = absorb

    def expand(self, rows_R: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds for keys and values of `rows_R` tokens out of the latents; 0 where there are none."""
        work = self.kernels.expand(rows_R).plus(self.kernels.assemble(rows_R))
        return np.where(rows_R > 0, work.seconds, 0.0)
