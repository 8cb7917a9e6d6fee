"""From one row per (token, rank) to rows grouped by slot, and back by an unweighted sum.

DeepEP's normal mode delivers a token once per rank and sums what ranks send back without weights;
our experts want rows sorted by slot. N received rows, P (row, slot) pairs, K top-k, H hidden, s slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.expert_parallel.pairs import local_pairs


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
    N, K = local_ids_NK.shape
    pair_P, counts_s = local_pairs(local_ids_NK.long(), first_slot=0, num_slots=slots)
    padded_s = (counts_s + alignment - 1) // alignment * alignment
    starts_s = torch.cumsum(padded_s, 0) - padded_s
    rows = int(padded_s.sum())
    shift_s = starts_s - (torch.cumsum(counts_s, 0) - counts_s)
    place_P = torch.arange(len(pair_P), device=pair_P.device) + torch.repeat_interleave(shift_s, counts_s)
    place_NK = torch.full((N, K), rows, dtype=torch.int64, device=pair_P.device)
    place_NK.view(-1)[pair_P] = place_P
    return Expansion(
        token_P=pair_P // max(K, 1),
        place_P=place_P,
        place_NK=place_NK,
        rows=rows,
        starts_s=starts_s.to(torch.int32),
        counts_s=counts_s.to(torch.int32),
    )


def expand(values_N: Tensor, plan: Expansion) -> Tensor:
    """[N, ...] -> [rows, ...]: each received row once per pair; rows in gaps are zero."""
    out = values_N.new_zeros(plan.rows, *values_N.shape[1:])
    # As bytes: not every dtype can be indexed.
    out.view(torch.uint8)[plan.place_P] = values_N.contiguous().view(torch.uint8)[plan.token_P]
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
