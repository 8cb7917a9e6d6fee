"""permute / unpermute on a CPU: one stable sort, one gather each way."""

import torch
from torch import Tensor

from moe_runtime.kernels.permute import reference


def permute(x_TH: Tensor, slot_ids_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, bit for bit."""
    flat_P = slot_ids_TK.reshape(-1)
    # Dropped pairs (-1) sort to the front and are cut off; bincount wants them at 0.
    counts_s1 = torch.bincount(flat_P + 1, minlength=num_slots + 1)
    dropped = int(counts_s1[0])
    order_N = flat_P.to(torch.int32).argsort(stable=True)[dropped:]
    rows_P = torch.full_like(flat_P, -1) if dropped else torch.empty_like(flat_P)
    rows_P[order_N] = torch.arange(order_N.shape[0])
    counts_s = counts_s1[1:].to(torch.int32)
    starts_s = (counts_s.cumsum(0) - counts_s).to(torch.int32)
    x_NH = x_TH.index_select(0, order_N.div_(max(1, slot_ids_TK.shape[1]), rounding_mode="floor"))
    return x_NH, rows_P.view(slot_ids_TK.shape), starts_s, counts_s


def unpermute(y_NH: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As the reference, bit for bit."""
    T, K = rows_TK.shape
    if y_NH.shape[0] != T * K or not T * K:
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
