"""permute / unpermute on a CPU: the order in numpy, whose calls cost less; one gather each way."""

import numpy as np
import torch
from torch import Tensor

from moe_runtime.kernels.permute import reference

_NARROW = np.iinfo(np.int16).max  # numpy sorts 16-bit integers by radix


def permute(
    x_TH: Tensor, slot_ids_TK: Tensor, num_slots: int, *, alignment: int = 1, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, bit for bit; aligned starts, which nobody on a CPU asks for, are made there."""
    if alignment != 1:
        return reference.permute(x_TH, slot_ids_TK, num_slots, alignment=alignment, capacity=capacity)
    flat_P = slot_ids_TK.numpy().reshape(-1)
    # Dropped pairs (-1) are counted at 0, sort to the front and are cut off.
    counts_s1 = np.bincount(flat_P + 1, minlength=num_slots + 1)
    keys_P = flat_P.astype(np.int16) if num_slots <= _NARROW else flat_P
    order_N = np.argsort(keys_P, kind="stable")[counts_s1[0] :]
    rows_P = np.full(len(flat_P), -1, np.int64)
    rows_P[order_N] = np.arange(len(order_N))
    counts_s = counts_s1[1:].astype(np.int32)
    starts_s = (np.cumsum(counts_s) - counts_s).astype(np.int32)
    token_N = torch.from_numpy(order_N // max(1, slot_ids_TK.shape[1]))
    rows_TK = torch.from_numpy(rows_P).view(slot_ids_TK.shape)
    N = len(order_N)
    assert capacity is None or capacity >= N
    x_NH = x_TH.new_empty(N if capacity is None else capacity, x_TH.shape[1])
    torch.index_select(x_TH, 0, token_N, out=x_NH[:N])
    return x_NH, rows_TK, torch.from_numpy(starts_s), torch.from_numpy(counts_s)


def unpermute(y_NH: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As the reference, bit for bit."""
    T, K = rows_TK.shape
    if not T * K or int(rows_TK.numpy().min()) < 0:
        return reference.unpermute(y_NH, rows_TK, weights_TK)
    terms_TKH = y_NH.index_select(0, rows_TK.view(-1)).view(T, K, -1)
    if y_NH.dtype is torch.float32:
        terms_TKH.mul_(weights_TK.unsqueeze(-1))
    else:
        terms_TKH = terms_TKH.float().mul_(weights_TK.unsqueeze(-1))
    # Starting from zero, as the reference does, turns -0.0 into 0.0.
    sum_TH = terms_TKH[:, 0] + 0.0
    for k in range(1, K):
        sum_TH += terms_TKH[:, k]
    return sum_TH.to(y_NH.dtype)
