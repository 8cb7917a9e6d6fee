"""MaskedBuffer: rows in static shapes from a transport that groups them, for low-latency steps.

Owns the way from GroupedRows to MaskedRows and back; the rows travel as they do for `inner`.
T tokens, N received rows, C capacity, H hidden, K top-k, s local slots.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import (
    Buffer,
    CombineOrder,
    MaskedRows,
    Rows,
    Sent,
    rows_per_slot,
)


@dataclass(slots=True)
class _Dispatch:
    sent: Sent[Rows]
    slot_ids_TK: Tensor
    capacity: int

    def wait(self) -> MaskedRows:
        grouped = self.sent.wait()
        valid_sC = _valid(grouped.counts, self.capacity)
        return MaskedRows(
            x=_spread(grouped.x, valid_sC),
            counts=grouped.counts,
            weights=None,
            state=grouped,
            scales=None if grouped.scales is None else _spread(grouped.scales, valid_sC),
            rows_per_slot=rows_per_slot(self.slot_ids_TK, len(grouped.counts)),
        )


class MaskedBuffer:
    """COLLECTIVE: see `buffer.Buffer`. `inner` delivers rows without gaps and sums in top-k order.

    `capacity`: rows per slot, ranks x the most rows a rank sends in one dispatch.
    """

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(self, inner: Buffer, *, capacity: int) -> None:
        assert inner.combine_order == "topk_fp32"
        self._inner, self._capacity = inner, capacity

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatch:
        """As `inner`; the rows are spread when they are waited for."""
        sent = self._inner.dispatch(x_TH, slot_ids_TK, weights_TK)
        return _Dispatch(sent, slot_ids_TK, self._capacity)

    def combine(self, y_sCH: Tensor, rows: Rows) -> Sent[Tensor]:
        """The valid rows of `y_sCH`, brought back by `inner`."""
        return self._inner.combine(y_sCH[_valid(rows.counts, self._capacity)], rows.state)


def _valid(counts_s: Tensor, capacity: int) -> Tensor:
    return torch.arange(capacity, device=counts_s.device)[None] < counts_s[:, None]


def _spread(x_NH: Tensor, valid_sC: Tensor) -> Tensor:
    """[s, C, H]: rows at their places, nothing written elsewhere."""
    spread = x_NH.new_empty(*valid_sC.shape, x_NH.shape[1])
    # As bytes: not every dtype can be indexed.
    spread.view(torch.uint8)[valid_sC] = x_NH.view(torch.uint8)
    return spread
