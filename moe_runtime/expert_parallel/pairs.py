"""(token, slot) pairs of a dispatch: where they go, and the sum on the way back. For backends whose
combine order is `topk_fp32`.

T tokens, K top-k, H hidden, R ranks, s slots per rank, U (token, rank) pairs.
"""

import torch
from torch import Tensor


def visits(slot_ids_TK: Tensor, *, num_ranks: int, slots_per_rank: int) -> Tensor:
    """bool [T, R]: which ranks each token goes to; pairs of slot -1 go nowhere."""
    # Column R takes the pairs that go nowhere.
    rank_TK = torch.where(slot_ids_TK < 0, num_ranks, slot_ids_TK // slots_per_rank)
    goes_TR = torch.zeros(len(slot_ids_TK), num_ranks + 1, dtype=torch.bool, device=slot_ids_TK.device)
    return goes_TR.scatter_(1, rank_TK.long(), True)[:, :num_ranks]


def destinations(slot_ids_TK: Tensor, *, num_ranks: int, slots_per_rank: int) -> tuple[Tensor, Tensor]:
    """The rows that travel, one per (token, rank), in order (rank, token).

    token int64 [U], and how many go to each rank: int64 [R].
    """
    goes_RT = visits(slot_ids_TK, num_ranks=num_ranks, slots_per_rank=slots_per_rank).t()
    return goes_RT.nonzero()[:, 1], goes_RT.sum(1)


def local_pairs(slot_ids_UK: Tensor, *, first_slot: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """The pairs of received rows that are for this rank, in order (slot, row).

    pair int64 [N], numbered row * K + k, and how many each slot gets: int64 [s].
    """
    local_P = slot_ids_UK.reshape(-1) - first_slot
    here_N = ((local_P >= 0) & (local_P < num_slots)).nonzero().squeeze(1)
    slot_N = local_P[here_N]
    return here_N[slot_N.argsort(stable=True)], torch.bincount(slot_N, minlength=num_slots)


def returning_rows(slot_ids_TK: Tensor, *, slots_per_rank: int) -> Tensor:
    """int64 [T, K]: the place of each pair among the rows that come back in order (rank, token, k);
    -1 for pairs that went nowhere."""
    slot_P = slot_ids_TK.reshape(-1)
    kept_N = (slot_P >= 0).nonzero().squeeze(1)
    order_N = kept_N[(slot_P[kept_N] // slots_per_rank).argsort(stable=True)]
    row_P = torch.full_like(slot_P, -1)
    row_P[order_N] = torch.arange(len(order_N), device=slot_P.device)
    return row_P.view_as(slot_ids_TK)


def weighted_sum(terms_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] in the dtype of the terms: sum over k = 0..K-1 of weight * term, in fp32. Overwrites the terms.

    Products and sums are single fp32 operations that start from zero: bit for bit what
    `kernels.unpermute` makes of the same rows.
    """
    T, K, H = terms_TKH.shape
    if not K:
        return terms_TKH.new_zeros(T, H)
    weights = weights_TK.unsqueeze(-1)
    fp32 = terms_TKH.dtype is torch.float32
    products_TKH = terms_TKH.mul_(weights) if fp32 else terms_TKH.float().mul_(weights)
    sum_TH = products_TKH[:, 0] + 0.0
    for k in range(1, K):
        sum_TH += products_TKH[:, k]
    return sum_TH.to(terms_TKH.dtype)
