"""A trace of what a rank does together with others, to be compared between ranks. LOCAL.

Off unless asked for, and then without a trace in the step: exchange and buffer are wrapped at construction.
Ranks of an instance must write the same, whatever their load; after a hang, the end of the shortest
trace tells what its rank did not come to.
"""

from collections.abc import Callable
from typing import ClassVar, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.engine.exchange import Exchange
from moe_runtime.expert_parallel.buffer import Buffer, CombineOrder, Rows, Sent
from moe_runtime.expert_parallel.where import StepAndLayer, Where


class Collective(msgspec.Struct, frozen=True, array_like=True):
    """One collective operation as it began: number `sequence` of its group; `layer` -1 outside the model."""

    group: str
    operation: str
    sequence: int
    step: int
    layer: int


class CollectiveTrace:
    """Hands every collective of a rank to `write`. The owner sets `where` once there is a clock."""

    def __init__(self, instance: str, write: Callable[[Collective], object]) -> None:
        self.where: Where = StepAndLayer()
        self._instance, self._write = instance, write
        self._sequence: dict[str, int] = {}

    def record(self, kind: str, operation: str, *, step: int, layer: int) -> None:
        """The next operation of the instance's group of this kind begins."""
        group = f"{self._instance}/{kind}"
        sequence = self._sequence[group] = self._sequence.get(group, -1) + 1
        self._write(Collective(group, operation, sequence, step, layer))


def writer(file: TextIO) -> Callable[[Collective], None]:
    """One JSON array a line, on disk when the operation begins."""

    def write(collective: Collective) -> None:
        file.write(msgspec.json.encode(collective).decode() + "\n")
        file.flush()

    return write


class TracedExchange:
    """An exchange that says when it is used."""

    def __init__(self, inner: Exchange, trace: CollectiveTrace) -> None:
        self._inner, self._trace = inner, trace

    def __call__(self, step: int, vector: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """COLLECTIVE: as `inner`."""
        self._trace.record("agreement", "exchange", step=step, layer=-1)
        return self._inner(step, vector)

    def look(self, step: int) -> None:
        """LOCAL: as `inner`."""
        self._inner.look(step)


class TracedBuffer:
    """A buffer that says when it is used; the rows go as they do for `inner`, which sums in top-k order."""

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(self, inner: Buffer, trace: CollectiveTrace) -> None:
        assert inner.combine_order == self.combine_order
        self._inner, self._trace = inner, trace

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> Sent[Rows]:
        """COLLECTIVE: as `inner`."""
        self._record("dispatch")
        return self._inner.dispatch(x_TH, slot_ids_TK, weights_TK)

    def combine(self, y: Tensor, rows: Rows) -> Sent[Tensor]:
        """COLLECTIVE: as `inner`."""
        self._record("combine")
        return self._inner.combine(y, rows)

    def _record(self, operation: str) -> None:
        where = self._trace.where
        self._trace.record("rows", operation, step=where.step, layer=where.layer)
