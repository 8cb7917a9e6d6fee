"""The expert-parallel seam: what every dispatch/combine backend offers.

Two phases each: `dispatch` and `combine` return at once with a handle, `wait()` completes
it; between the two the other micro-batch may compute. N received rows, T tokens, K top-k,
H hidden, s local slots.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from torch import Tensor

CombineOrder = Literal["topk_fp32", "backend"]
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Received rows in order (slot, source rank, token): prefill, and everything on CPU.

    x        [N, H]; rows in gaps between groups (aligned starts) are zero
    starts   int32 [s], first row of each local slot
    counts   int32 [s], rows of each local slot
    weights  [N] fp32 or None. Not None: the expert epilogue multiplies, None: the backend does
    state    whatever the backend needs to bring the rows back; opaque to everybody else
    """

    x: Tensor
    starts: Tensor
    counts: Tensor
    weights: Tensor | None
    state: Any


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Received rows with static shapes: decode on a device.

    x        [s, capacity, H]; the first counts[i] rows of slot i are valid
    counts   int32 [s]
    weights  [s, capacity] fp32 or None, as in GroupedRows
    state    opaque
    """

    x: Tensor
    counts: Tensor
    weights: Tensor | None
    state: Any


Rows = GroupedRows | MaskedRows


class Sent(Protocol, Generic[Result]):
    """A transfer in flight. `wait` may be called once."""

    def wait(self) -> Result: ...


class Buffer(Protocol):
    """COLLECTIVE: every rank of the instance makes the same calls in the same order.

    A backend declares `combine_order`: `topk_fp32` sums in top-k order in fp32, so results
    do not depend on placement or EP degree; `backend` sums in an order of its own.
    """

    combine_order: ClassVar[CombineOrder]

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> Sent[GroupedRows]:
        """Send row t to each slot of slot_ids_TK[t] (int64, -1 sends nothing). T = 0 is legal.

        `weights_TK` fp32 already include the routed scale.
        """
        ...

    def combine(self, y_NH: Tensor, rows: GroupedRows) -> Sent[Tensor]:
        """Bring expert outputs back: [T, H] in the dtype of y, the weighted sum over top-k."""
        ...
