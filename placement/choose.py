"""Which replica of its expert each (token, choice) pair goes to: the numpy oracle of the device's chooser.

Two modes. `balanced`: the n pairs that an expert has in this dispatch are dealt over its replicas by their
shares, to within one pair. `sticky`: a function of request and position, so that the same token always meets
the same replica whatever else is in the batch, and replicas get their shares in the long run.
T tokens, K top-k, E experts, S slots. Tables are those of one layer (see `Placement.replicas`).
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.errors import PlacementError
from moe_runtime.placement.placement import FULL_RANGE, Placement


def rank_offset(rank: int, num_ranks: int) -> int:
    """Where a source rank begins to deal, in 65536ths: ranks with few tokens then choose differently."""
    return rank * FULL_RANGE // num_ranks


def choose(
    expert_ids_TK: NDArray[np.int64],
    placement: Placement,
    layer: int,
    *,
    rank: int,
    mode: Literal["balanced", "sticky"] = "balanced",
    request_T: NDArray[np.uint64] | None = None,
    position_T: NDArray[np.int64] | None = None,
    cumulative_S: NDArray[np.uint16] | None = None,
) -> NDArray[np.int64]:
    """slot_ids int64 [T, K] of pairs that start on `rank`; expert id -1 gives slot -1.

    `cumulative_S` replaces the placement's own table of the layer (see `tables.near_first`). `sticky` needs
    the request number and position of each token. Raises PlacementError for experts that do not exist.
    """
    start, slots = placement.replicas
    table = placement.cumulative_csr[layer] if cumulative_S is None else cumulative_S
    if mode == "balanced":
        offset = rank_offset(rank, placement.num_ranks)
        return choose_balanced(expert_ids_TK, start[layer], slots[layer], table, offset)
    if mode != "sticky":
        raise PlacementError(f"mode = {mode!r}: balanced or sticky")
    if request_T is None or position_T is None:
        raise PlacementError("mode sticky needs the request number and position of each token")
    return choose_sticky(expert_ids_TK, request_T, position_T, start[layer], slots[layer], table)


def choose_balanced(
    expert_ids_TK: NDArray[np.int64],
    replica_start_E1: NDArray[np.int32],
    replica_slots_S: NDArray[np.int32],
    cumulative_S: NDArray[np.uint16],
    offset: int,
) -> NDArray[np.int64]:
    """slot_ids int64 [T, K]; expert id -1 gives slot -1.

    Pair i of the n that an expert has here, in (t, k) order, looks up the point
    ((2 i + 1) * 32768 // n + offset) mod 65536 in its cumulative table.
    """
    flat_P = expert_ids_TK.reshape(-1).astype(np.int64)
    _check_ids(flat_P, len(replica_start_E1) - 1)
    real = np.flatnonzero(flat_P >= 0)
    order = real[np.argsort(flat_P[real], kind="stable")]
    expert = flat_P[order]
    count = np.bincount(expert, minlength=len(replica_start_E1) - 1)
    first = np.cumsum(count) - count
    index = np.arange(len(order)) - first[expert]
    point = ((2 * index + 1) * (FULL_RANGE // 2) // np.maximum(count[expert], 1) + offset) % FULL_RANGE
    slots_P = np.full(len(flat_P), -1, np.int64)
    slots_P[order] = _lookup(expert, point, replica_start_E1, replica_slots_S, cumulative_S)
    return slots_P.reshape(expert_ids_TK.shape)


def choose_sticky(
    expert_ids_TK: NDArray[np.int64],
    request_T: NDArray[np.uint64],
    position_T: NDArray[np.int64],
    replica_start_E1: NDArray[np.int32],
    replica_slots_S: NDArray[np.int32],
    cumulative_S: NDArray[np.uint16],
) -> NDArray[np.int64]:
    """slot_ids int64 [T, K]; expert id -1 gives slot -1.

    The point is 16 bits of a hash of request number and position: the same for all of a token's
    experts, unrelated between tokens.
    """
    flat_P = expert_ids_TK.reshape(-1).astype(np.int64)
    _check_ids(flat_P, len(replica_start_E1) - 1)
    point_P = np.repeat(sticky_point(request_T, position_T), expert_ids_TK.shape[1])
    real = flat_P >= 0
    slots_P = np.full(len(flat_P), -1, np.int64)
    slots_P[real] = _lookup(flat_P[real], point_P[real], replica_start_E1, replica_slots_S, cumulative_S)
    return slots_P.reshape(expert_ids_TK.shape)


def sticky_point(request_T: NDArray[np.uint64], position_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [T] in 0..65535: the top 16 bits of splitmix64(splitmix64(request) + position)."""
    mixed = _splitmix64(np.asarray(request_T).astype(np.uint64))
    mixed = _splitmix64(mixed + np.asarray(position_T).astype(np.uint64))
    return (mixed >> np.uint64(48)).astype(np.int64)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of Steele, Lea and Flood's SplitMix64; wraps modulo 2^64."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _lookup(
    expert: NDArray[np.int64],
    point: NDArray[np.int64],
    start_E1: NDArray[np.int32],
    slots_S: NDArray[np.int32],
    cumulative_S: NDArray[np.uint16],
) -> NDArray[np.int64]:
    """The slot whose interval of its expert's table holds the point: the last that starts at or before it."""
    used = int(start_E1[-1])
    owner = np.repeat(np.arange(len(start_E1) - 1), np.diff(start_E1))
    # One ascending key per replica, expert first: a single binary search serves all experts.
    key = owner * FULL_RANGE + cumulative_S[:used].astype(np.int64)
    at = np.searchsorted(key, expert * FULL_RANGE + point, side="right") - 1
    return slots_S[at].astype(np.int64)


def _check_ids(flat_P: NDArray[np.int64], num_experts: int) -> None:
    if flat_P.size and (flat_P.max() >= num_experts or flat_P.min() < -1):
        wrong = int(np.flatnonzero((flat_P >= num_experts) | (flat_P < -1))[0])
        raise PlacementError(f"pair {wrong}: expert {flat_P[wrong]} is not in -1..{num_experts - 1}")
