"""From received rows in order (slot, source rank, token) to the layout a buffer was built for, and back.

N received rows, H hidden, s local slots.
"""

from typing import Any

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import GroupedRows, MaskedRows, Rows


def arrange(
    x_NH: Tensor,
    scales_NB: Tensor | None,
    starts_s: Tensor,
    counts_s: Tensor,
    *,
    capacity: int | None,
    state: Any,
) -> Rows:
    """GroupedRows, or with a `capacity` MaskedRows of that many rows per slot. starts, counts int32 [s]."""
    if capacity is None:
        return GroupedRows(x_NH, starts_s, counts_s, None, state, scales_NB)
    valid_sc = _valid(counts_s, capacity)
    return MaskedRows(
        x=_spread(x_NH, valid_sc),
        counts=counts_s,
        weights=None,
        state=state,
        scales=None if scales_NB is None else _spread(scales_NB, valid_sc),
    )


def outputs(y: Tensor, rows: Rows) -> Tensor:
    """[N, H]: the valid rows of y, which has the layout of `rows`, in order (slot, source rank, token)."""
    if isinstance(rows, GroupedRows):
        return y
    return y[_valid(rows.counts, rows.x.shape[1])]


def _valid(counts_s: Tensor, capacity: int) -> Tensor:
    return torch.arange(capacity, device=counts_s.device)[None] < counts_s[:, None]


def _spread(x_NH: Tensor, valid_sc: Tensor) -> Tensor:
    """[s, capacity, H]: rows at their places, nothing written elsewhere."""
    spread = x_NH.new_empty(*valid_sc.shape, x_NH.shape[1])
    # As bytes: not every dtype can be indexed.
    spread.view(torch.uint8)[valid_sc] = x_NH.view(torch.uint8)
    return spread
