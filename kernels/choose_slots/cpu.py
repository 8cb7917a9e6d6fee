"""choose_slots on a CPU, in numpy: integers only, and calls that cost less than torch's."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.kernels.choose_slots.reference import FULL_RANGE, Mode, sticky_point

I64 = NDArray[np.int64]


def choose_slots(
    expert_ids_TK: Tensor,
    replica_start_E1: Tensor,
    replica_slots_S: Tensor,
    cumulative_S: Tensor,
    offset: int,
    *,
    mode: Mode = "balanced",
    request_T: Tensor | None = None,
    position_T: Tensor | None = None,
    real_tokens: Tensor | None = None,
    load_E: Tensor | None = None,
) -> Tensor:
    """As the reference, bit for bit."""
    ids_TK: I64 = expert_ids_TK.numpy()
    if real_tokens is not None:
        ids_TK = np.where(np.arange(len(ids_TK))[:, None] < int(real_tokens), ids_TK, -1)
    start_E1, slots_S = replica_start_E1.numpy(), replica_slots_S.numpy()
    if load_E is not None:
        load_E.numpy()[:] += np.bincount(ids_TK.reshape(-1) + 1, minlength=len(start_E1))[1:]
    used = int(start_E1[-1])
    if used == len(start_E1) - 1:  # every expert has a replica, so each has exactly one, at its own place
        place_TK = ids_TK
    else:
        ids_P = ids_TK.reshape(-1)
        if mode == "sticky":
            assert request_T is not None
            assert position_T is not None
            point_P = sticky_point(request_T, position_T).numpy().repeat(ids_TK.shape[1])
        else:
            point_P = _balanced_points(ids_P, len(start_E1), offset)
        place_TK = _place(ids_P, point_P, start_E1, cumulative_S.numpy()[:used]).reshape(ids_TK.shape)
    slot_ids_TK = slots_S[:used][place_TK].astype(np.int64)
    slot_ids_TK[ids_TK < 0] = -1
    return torch.from_numpy(slot_ids_TK)


def _balanced_points(ids_P: I64, num_ids: int, offset: int) -> I64:
    counts = np.bincount(ids_P + 1, minlength=num_ids)
    order = np.argsort(ids_P, kind="stable")
    index_P = np.empty_like(ids_P)
    index_P[order] = np.arange(len(ids_P)) - (np.cumsum(counts) - counts)[ids_P[order] + 1]
    points_P: I64 = ((2 * index_P + 1) * (FULL_RANGE // 2) // counts[ids_P + 1] + offset) % FULL_RANGE
    return points_P


def _place(ids_P: I64, point_P: I64, start_E1: NDArray[np.int32], cumulative_S: NDArray[np.uint16]) -> I64:
    """Index among all replicas of the one each pair goes to; arbitrary for id -1."""
    # One search over all experts: an expert's intervals lie within [expert, expert + 1) * 65536.
    owner_S = np.repeat(np.arange(len(start_E1) - 1), np.diff(start_E1))
    key_S = owner_S * FULL_RANGE + cumulative_S
    place_P: I64 = np.searchsorted(key_S, ids_P * FULL_RANGE + point_P, side="right") - 1
    return place_P
