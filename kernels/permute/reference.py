"""permute / unpermute: token rows to rows grouped by slot, and expert outputs back to tokens.

T tokens, K top-k, N rows (the pairs with a slot), s slots, H hidden.
"""

import torch
from torch import Tensor


def permute(
    x_TH: Tensor, slot_ids_TK: Tensor, num_slots: int, *, alignment: int = 1, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in order (slot, token, k): x [N, H], rows int64 [T, K], starts int32 [s], counts int32 [s].

    Pair (t, k) with slot id >= 0 becomes a copy of row t at rows[t, k]; slot id -1 is dropped and
    rows[t, k] is -1. Every slot starts at a multiple of `alignment`; rows between a slot's last and
    the next multiple are zero. N is the end of the last slot, or `capacity`, with which a GPU need not
    tell the host how many there are: it must suffice (`row_capacity`), and what lies beyond the last
    slot is not written.
    """
    flat_P = slot_ids_TK.reshape(-1)
    kept = (flat_P >= 0).nonzero().squeeze(1)
    order_N = kept[flat_P[kept].argsort(stable=True)]
    counts_s = torch.bincount(flat_P[kept], minlength=num_slots)
    sizes_s = (counts_s + alignment - 1) // alignment * alignment
    starts_s = sizes_s.cumsum(0) - sizes_s
    N = int(sizes_s.sum())
    assert capacity is None or capacity >= N
    # The i-th pair in order lies as far behind its slot's start as behind the slot's first pair.
    first_s = counts_s.cumsum(0) - counts_s
    slot_N = flat_P[order_N]
    place_N = torch.arange(len(order_N), device=flat_P.device) - first_s[slot_N] + starts_s[slot_N]
    rows_P = torch.full_like(flat_P, -1)
    rows_P[order_N] = place_N
    x_NH = x_TH.new_zeros(N if capacity is None else capacity, x_TH.shape[1])
    x_NH[place_N] = x_TH[order_N // max(1, slot_ids_TK.shape[1])]
    return x_NH, rows_P.view_as(slot_ids_TK), starts_s.to(torch.int32), counts_s.to(torch.int32)


def row_capacity(pairs: int, num_slots: int, alignment: int) -> int:
    """Rows that suffice for `pairs` pairs, however they fall on the slots."""
    return pairs + min(pairs, num_slots) * (alignment - 1)


def unpermute(y_NH: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] in y's dtype: the sum over k of weights[t, k] * y[rows[t, k]], dropped pairs left out.

    Products and sums are single fp32 operations in the order k = 0 .. K-1, so a token's result
    depends on nothing but its own rows and weights, bit for bit.
    """
    sum_TH = y_NH.new_zeros(rows_TK.shape[0], y_NH.shape[1], dtype=torch.float32)
    for k in range(rows_TK.shape[1]):
        present = (rows_TK[:, k] >= 0).nonzero().squeeze(1)
        product = y_NH[rows_TK[present, k]].float() * weights_TK[present, k, None]
        sum_TH[present] += product
    return sum_TH.to(y_NH.dtype)
