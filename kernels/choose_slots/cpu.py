"""choose_slots on a CPU: one table look-up without replicas, a few vector operations with them."""

import torch
from torch import Tensor

from moe_runtime.kernels.choose_slots.reference import FULL_RANGE


def choose_slots(
    expert_ids_TK: Tensor,
    replica_start_E1: Tensor,
    replica_slots_S: Tensor,
    cumulative_S: Tensor,
    offset: int,
) -> Tensor:
    """As the reference, bit for bit."""
    num_experts = replica_start_E1.shape[0] - 1
    used = int(replica_start_E1[-1])
    if used == num_experts:  # every expert has a replica, so each has exactly one
        slots_TK = _take(replica_slots_S[:num_experts].to(torch.int64), expert_ids_TK)
    else:
        slots_TK = _among_replicas(
            expert_ids_TK,
            replica_start_E1.to(torch.int64),
            replica_slots_S[:used],
            cumulative_S[:used],
            offset,
        )
    return slots_TK.masked_fill_(expert_ids_TK < 0, -1)


def _take(table: Tensor, ids: Tensor) -> Tensor:
    return table.index_select(0, ids.clamp_min(0).view(-1)).view(ids.shape)


def _among_replicas(
    expert_ids_TK: Tensor, start_E1: Tensor, replica_slots_S: Tensor, cumulative_S: Tensor, offset: int
) -> Tensor:
    flat_P = expert_ids_TK.reshape(-1).clamp_min(-1)
    index_P, count_P = _rank_among_equals(flat_P)
    point_P = (index_P * 2 + 1).mul_(FULL_RANGE // 2).div_(count_P, rounding_mode="floor")
    point_P.add_(offset).remainder_(FULL_RANGE)
    # One search over all experts: an expert's intervals lie within [expert, expert + 1) * 65536.
    replicas_E = start_E1.diff()
    owner_S = torch.repeat_interleave(torch.arange(replicas_E.shape[0]), replicas_E)
    key_S = owner_S * FULL_RANGE + cumulative_S.to(torch.int64)
    holder_P = torch.searchsorted(key_S, flat_P * FULL_RANGE + point_P, right=True).sub_(1)
    return _take(replica_slots_S.to(torch.int64), holder_P).view(expert_ids_TK.shape)


def _rank_among_equals(ids_P: Tensor) -> tuple[Tensor, Tensor]:
    """For each element, how many equal ones precede it, and how many equal ones there are. ids >= -1."""
    shifted = ids_P + 1
    counts = torch.bincount(shifted)
    order = shifted.argsort(stable=True)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(ids_P)
    rank[order] = torch.arange(ids_P.shape[0]) - first[shifted[order]]
    return rank, counts[shifted]
