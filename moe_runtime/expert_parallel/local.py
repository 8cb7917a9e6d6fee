"""The `local` backend: EP degree 1. Nothing travels; rows are only sorted by slot and summed back."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import CombineOrder, GroupedRows
from moe_runtime.expert_parallel.meter import TransportMeter
from moe_runtime.expert_parallel.pairs import Pairs, sort_pairs, weighted_sum


@dataclass(slots=True)
class _Dispatched:
    rows: GroupedRows

    def wait(self) -> GroupedRows:
        return self.rows


@dataclass(slots=True)
class _Combined:
    y_PH: Tensor
    pairs: Pairs

    def wait(self) -> Tensor:
        return weighted_sum(self.y_PH, self.pairs)


class LocalBuffer:
    """LOCAL: see `buffer.Buffer`; the arithmetic is that of every `topk_fp32` backend, bit for bit."""

    combine_order: ClassVar[CombineOrder] = "topk_fp32"

    def __init__(self, *, slots_per_rank: int) -> None:
        self.meter = TransportMeter()
        self._slots = slots_per_rank

    def dispatch(self, x_TH: Tensor, slot_ids_TK: Tensor, weights_TK: Tensor) -> _Dispatched:
        """Rows in order (slot, token)."""
        pairs = sort_pairs(slot_ids_TK, weights_TK, self._slots)
        starts_s = torch.cumsum(pairs.counts_S, 0) - pairs.counts_S
        self.meter.totals.received_rows.append(len(pairs.token_P))
        rows = GroupedRows(
            x=x_TH[pairs.token_P],
            starts=starts_s.to(torch.int32),
            counts=pairs.counts_S.to(torch.int32),
            weights=None,
            state=pairs,
        )
        return _Dispatched(rows)

    def combine(self, y_NH: Tensor, rows: GroupedRows) -> _Combined:
        """The weighted sum of `y_NH`, whose rows are in the order of `rows`."""
        return _Combined(y_NH, rows.state)
