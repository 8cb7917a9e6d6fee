"""From one row per (token, rank) to rows grouped by slot, and back by an unweighted sum.

DeepEP's normal mode delivers a token once per rank and sums what ranks send back without weights;
our experts want rows sorted by slot. N received rows, P (row, slot) pairs, K top-k, H hidden, s slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.expert_parallel.pairs import sort_pairs


@dataclass(frozen=True, slots=True)
class Expansion:
    """Where the pairs of the received rows stand.

    token_P      int64, the received row of each pair, pairs in order (slot, row)
    place_P      int64, the pair's row in the grouped layout
    place_NK     int64, the same by received row and k; `rows` where the pair does not exist
    rows         rows of the grouped layout, gaps included
    starts_s, counts_s  int32
    """

    token_P: Tensor
    place_P: Tensor
    place_NK: Tensor
    rows: int
    starts_s: Tensor
    counts_s: Tensor


def plan_expansion(local_ids_NK: Tensor, *, slots: int, alignment: int) -> Expansion:
    """Group received rows by slot; every group starts at a multiple of `alignment`."""
    ids_NK = local_ids_NK.long()
    pairs = sort_pairs(ids_NK, ids_NK.new_zeros(ids_NK.shape, dtype=torch.float32), slots)
    counts_s = pairs.counts_S
    padded_s = (counts_s + alignment - 1) // alignment * alignment
    starts_s = torch.cumsum(padded_s, 0) - padded_s
    rows = int(padded_s.sum())
    shift_s = starts_s - (torch.cumsum(counts_s, 0) - counts_s)
    P = len(pairs.token_P)
    place_P = torch.arange(P, device=ids_NK.device) + torch.repeat_interleave(shift_s, counts_s)
    place_or_none = torch.cat([place_P, place_P.new_full((1,), rows)])
    return Expansion(
        token_P=pairs.token_P,
        place_P=place_P,
        place_NK=place_or_none[pairs.row_TK],
        rows=rows,
        starts_s=starts_s.to(torch.int32),
        counts_s=counts_s.to(torch.int32),
    )


def expand(values_N: Tensor, plan: Expansion) -> Tensor:
    """[N, ...] -> [rows, ...]: each received row once per pair; rows in gaps are zero."""
    out = values_N.new_zeros(plan.rows, *values_N.shape[1:])
    out[plan.place_P] = values_N[plan.token_P]
    return out


def pair_weights(weights_NK: Tensor, plan: Expansion) -> Tensor:
    """fp32 [rows]: the weight of each pair at its place; 0 in gaps."""
    out = weights_NK.new_zeros(plan.rows + 1)
    out[plan.place_NK.reshape(-1)] = weights_NK.reshape(-1)
    return out[: plan.rows]


def reduce(y_rows: Tensor, plan: Expansion) -> Tensor:
    """[rows, H] -> [N, H]: the sum of each received row's pairs in the order of k, in fp32."""
    N, K = plan.place_NK.shape
    total_NH = torch.zeros(N, y_rows.shape[1], dtype=torch.float32, device=y_rows.device)
    if not plan.rows:
        return total_NH.to(y_rows.dtype)
    for k in range(K):
        place_N = plan.place_NK[:, k]
        exists_N = place_N < plan.rows
        term_NH = y_rows[place_N.clamp(max=plan.rows - 1)].float()
        total_NH += torch.where(exists_N[:, None], term_NH, 0.0)
    return total_NH.to(y_rows.dtype)
