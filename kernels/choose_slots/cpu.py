"""choose_slots on a CPU, in numpy: integers only, and calls that cost less than torch's."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.kernels.choose_slots.reference import FULL_RANGE

I64 = NDArray[np.int64]


def choose_slots(
    expert_ids_TK: Tensor,
    replica_start_E1: Tensor,
    replica_slots_S: Tensor,
    cumulative_S: Tensor,
    offset: int,
) -> Tensor:
    """As the reference, bit for bit."""
    ids_TK: I64 = expert_ids_TK.numpy()
    start_E1, slots_S = replica_start_E1.numpy(), replica_slots_S.numpy()
    used = int(start_E1[-1])
    if used == len(start_E1) - 1:  # every expert has a replica, so each has exactly one, at its own place
        place_TK = ids_TK
    else:
        place_TK = _place_of_pairs(ids_TK.reshape(-1), start_E1, cumulative_S.numpy()[:used], offset)
        place_TK = place_TK.reshape(ids_TK.shape)
    slot_ids_TK = slots_S[:used][place_TK].astype(np.int64)
    slot_ids_TK[ids_TK < 0] = -1
    return torch.from_numpy(slot_ids_TK)


def _place_of_pairs(
    ids_P: I64, start_E1: NDArray[np.int32], cumulative_S: NDArray[np.uint16], offset: int
) -> I64:
    """Index among all replicas of the one each pair goes to; arbitrary for id -1."""
    counts = np.bincount(ids_P + 1, minlength=len(start_E1))
    order = np.argsort(ids_P, kind="stable")
    index_P = np.empty_like(ids_P)
    index_P[order] = np.arange(len(ids_P)) - (np.cumsum(counts) - counts)[ids_P[order] + 1]
    point_P = ((2 * index_P + 1) * (FULL_RANGE // 2) // counts[ids_P + 1] + offset) % FULL_RANGE
    # One search over all experts: an expert's intervals lie within [expert, expert + 1) * 65536.
    owner_S = np.repeat(np.arange(len(start_E1) - 1), np.diff(start_E1))
    key_S = owner_S * FULL_RANGE + cumulative_S
    place_P: I64 = np.searchsorted(key_S, ids_P * FULL_RANGE + point_P, side="right") - 1
    return place_P
