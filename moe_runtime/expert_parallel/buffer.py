"""The expert-parallel seam: what every dispatch/combine backend offers.

Two phases each: `dispatch` and `combine` return at once with a handle, `wait()` completes
it; between the two the other micro-batch may compute. N received rows, T tokens, K top-k,
H hidden, s local slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from moe_runtime.spec.limits import DispatchMode

CombineOrder = Literal["topk_fp32", "backend"]
Result = TypeVar("Result", covariant=True)

SCALE_BLOCK = 128


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Received rows in order (slot, source rank, token): prefill, and everything on CPU.

    x        [N, H] as it travelled; rows in gaps between groups (aligned starts) are zero
    starts   int32 [s], first row of each local slot
    counts   int32 [s], rows of each local slot
    weights  [N] fp32 or None. Not None: the expert epilogue multiplies, None: the backend does
    state    whatever the backend needs to bring the rows back; opaque to everybody else
    scales   fp32 [N, H / 128] if x is fp8: the value of an element is x times its block's scale
    """

    x: Tensor
    starts: Tensor
    counts: Tensor
    weights: Tensor | None
    state: Any
    scales: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """[N, H] in the dtype the experts compute in; x itself if it travelled in that."""
        return _values(self.x, self.scales, dtype)


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Received rows with static shapes: decode on a device. capacity = ranks x tokens per rank and round.

    x              [s, capacity, H] as it travelled; the first counts[i] rows of slot i are valid, in order
                   (source rank, token) unless the backend says otherwise; the others hold anything
    counts         int32 [s]
    weights        [s, capacity] fp32 or None, as in GroupedRows
    state          opaque
    scales         fp32 [s, capacity, H / 128] if x is fp8, as in GroupedRows
    rows_per_slot  how many rows the host expects of a slot, as `counts` lie on the device; None: no idea
    """

    x: Tensor
    counts: Tensor
    weights: Tensor | None
    state: Any
    scales: Tensor | None = None
    rows_per_slot: int | None = None

    @property
    def starts(self) -> Tensor:
        """int32 [s]: first row of each slot in x seen as [s * capacity, H]."""
        s, capacity = self.x.shape[:2]
        return torch.arange(0, s * capacity, capacity, dtype=torch.int32, device=self.x.device)

    def values(self, dtype: torch.dtype) -> Tensor:
        """[s, capacity, H] in the dtype the experts compute in; x itself if it travelled in that."""
        return _values(self.x, self.scales, dtype)


Rows = GroupedRows | MaskedRows


def rows_per_slot(slot_ids_TK: Tensor, slots_per_rank: int) -> int | None:
    """Rows of a slot on average, if all ranks dispatch as many as this one; None if this one is idle.

    From shapes alone. R ranks bring T * K rows each to R * slots_per_rank slots.
    """
    T, K = slot_ids_TK.shape
    return -(-T * K // slots_per_rank) or None


def _values(x: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return x.to(dtype)
    blocks = x.float().view(*x.shape[:-1], scales.shape[-1], SCALE_BLOCK)
    return blocks.mul_(scales.unsqueeze(-1)).view(x.shape).to(dtype)


class Sent(Protocol, Generic[Result]):
    """A transfer in flight. `wait` may be called once."""

    def wait(self) -> Result: ...


class Buffer(Protocol):
    """COLLECTIVE: every rank of the instance makes the same calls in the same order.

    A buffer has one row layout: that of the dispatch mode it serves (see `Buffers`).

    A backend declares `combine_order`: `topk_fp32` sums in top-k order in fp32, so results
    do not depend on placement or EP degree; `backend` sums in an order of its own.
    """

    combine_order: ClassVar[CombineOrder]

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> Sent[Rows]:
        """Send row t to each slot of slot_ids_TK[t] (int64, -1 sends nothing). T = 0 is legal.

        The slots of a token are distinct: the capacity of `MaskedRows` rests on it, and so does DeepEP.
        `weights_TK` fp32 already include the routed scale.
        """
        ...

    def combine(self, y: Tensor, rows: Rows) -> Sent[Tensor]:
        """Bring expert outputs back: [T, H] in the dtype of y, the weighted sum over top-k.

        y has the shape of `rows.x`; what it holds where `rows` has no valid row does not matter.
        """
        ...


Buffers = Mapping[DispatchMode, Buffer]
"""The buffers of an instance by the mode that all ranks agreed on for a step: GroupedRows in `normal`,
MaskedRows in `low_latency`."""
