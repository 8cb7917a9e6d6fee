"""Tables of a layer's kernels by the number of rows, so that a step looks them up for all ranks at once.

Owns the grouping of kernels into stages and parts. Built once per deployment (and share of multiprocessors),
grown on demand. N: every integer number of tokens from 0 on.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.work import Work

FIRST_SIZE = 1024


class RowParts(NamedTuple):
    """Kernels of a layer at one number of rows.

    dense, router, other   before the rows leave, but for the attention core and what depends on the phase
    first                  seconds of those before the core
    shared_dense, shared_other, finish   of a MoE layer
    mlp_dense, mlp_other   of a dense layer
    """

    dense: Work
    router: Work
    other: Work
    first: float
    shared_dense: Work
    shared_other: Work
    finish: Work
    mlp_dense: Work
    mlp_other: Work


class RowTables:
    """Work by rows; `first_N`, `before_N` and `absorb_N` in seconds, for all ranks at once."""

    def __init__(self, kernels: LayerKernels) -> None:
        self.kernels = kernels
        self._parts: dict[int, RowParts] = {}
        self._absorb: dict[int, Work] = {}
        self._core: dict[int, Work] = {}
        self._grow(FIRST_SIZE)

    def need(self, rows: int) -> None:
        """Make the tables hold `rows`."""
        if rows >= len(self.before_N):
            self._grow(max(rows + 1, 2 * len(self.before_N)))

    def at(self, rows: int) -> RowParts:
        """The kernels at `rows`, by part."""
        found = self._parts.get(rows)
        if found is None:
            found = self._parts[rows] = self._make(float(rows))
        return found

    def absorb(self, rows: int) -> Work:
        """Latent projections of decode rows; nothing without any."""
        found = self._absorb.get(rows)
        if found is None:
            found = self._absorb[rows] = self.kernels.absorb(float(rows)) if rows else Work()
        return found

    def core(self, queries: int) -> Work:
        """Decode attention per token of context, `queries` rows a sequence."""
        found = self._core.get(queries)
        if found is None:
            found = self._core[queries] = self.kernels.decode_core(1.0, queries)
        return found

    def expand(self, rows_R: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds for keys and values of `rows_R` tokens out of the latents; 0 where there are none."""
        work = self.kernels.expand(rows_R).plus(self.kernels.assemble(rows_R))
        return np.where(rows_R > 0, work.seconds, 0.0)

    def _grow(self, size: int) -> None:
        k, rows_N = self.kernels, np.arange(size, dtype=np.float64)
        first = k.project(rows_N).plus(k.stream_first(rows_N))
        work = first.plus(k.output(rows_N), k.router(rows_N), k.stream_second(rows_N))
        self.first_N: NDArray[np.float64] = np.asarray(first.seconds, np.float64)
        self.before_N: NDArray[np.float64] = np.asarray(work.seconds, np.float64)
        self.absorb_N: NDArray[np.float64] = np.zeros(size) + k.absorb(rows_N).seconds
        self.absorb_N[0] = 0.0

    def _make(self, rows: float) -> RowParts:
        k = self.kernels
        project, stream_first = k.project(rows), k.stream_first(rows)
        shared, dense = k.model.moe.shared_intermediate, k.model.dense_intermediate
        return RowParts(
            dense=project.plus(k.output(rows)),
            router=k.router(rows),
            other=stream_first.plus(k.stream_second(rows)),
            first=project.seconds + stream_first.seconds,
            shared_dense=k.mlp(rows, shared) if shared else Work(),
            shared_other=k.stream_mlp(rows, shared) if shared else Work(),
            finish=k.stream_finish(rows),
            mlp_dense=k.mlp(rows, dense),
            mlp_other=k.stream_mlp(rows, dense),
        )
