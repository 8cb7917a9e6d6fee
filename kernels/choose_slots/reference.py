"""choose_slots: which replica of its expert each (token, choice) pair goes to; mode `balanced`.

T tokens, K top-k, E experts, S slots. Tables are CSR, of one layer: the replicas of expert e are
entries replica_start[e] .. replica_start[e + 1] of `replica_slots` (slot ids) and of `cumulative`
(exclusive start of each replica's share in 65536ths, ascending, the first 0; 65536 at the end is
implied). Entries beyond replica_start[E] are unused.
"""

import torch
from torch import Tensor

FULL_RANGE = 65536


def choose_slots(
    expert_ids_TK: Tensor,
    replica_start_E1: Tensor,
    replica_slots_S: Tensor,
    cumulative_S: Tensor,
    offset: int,
) -> Tensor:
    """slot_ids int64 [T, K]; expert id -1 gives slot -1.

    Pair i of the n that an expert has here, in (t, k) order, looks up the point
    ((2 i + 1) * 32768 // n + offset) mod 65536: the middle of the i-th of n equal parts. It goes to
    the replica whose interval holds the point, so replicas get their shares to within one pair.
    """
    flat_P = expert_ids_TK.reshape(-1)
    slots_P = torch.full_like(flat_P, -1)
    start = replica_start_E1.tolist()
    shares_S = cumulative_S.to(torch.int64)
    for expert in torch.unique(flat_P).tolist():
        if expert < 0:
            continue
        pairs = (flat_P == expert).nonzero().squeeze(1)
        index = torch.arange(len(pairs), device=flat_P.device)
        point = ((2 * index + 1) * (FULL_RANGE // 2) // len(pairs) + offset) % FULL_RANGE
        replicas = slice(start[expert], start[expert + 1])
        holder = torch.searchsorted(shares_S[replicas].contiguous(), point, right=True) - 1
        slots_P[pairs] = replica_slots_S[replicas].to(torch.int64)[holder]
    return slots_P.view_as(expert_ids_TK)
