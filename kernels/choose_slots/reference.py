"""choose_slots: which replica of its expert each (token, choice) pair goes to.

Two modes. `balanced` deals the pairs that an expert has in this call over its replicas; `sticky` goes by
a hash of request and position, so that the same token always meets the same replica.

T tokens, K top-k, E experts, S slots. Tables are CSR, of one layer: the replicas of expert e are
entries replica_start[e] .. replica_start[e + 1] of `replica_slots` (slot ids) and of `cumulative`
(exclusive start of each replica's share in 65536ths, ascending, the first 0; 65536 at the end is
implied). Entries beyond replica_start[E] are unused.
"""

from typing import Literal

import torch
from torch import Tensor

FULL_RANGE = 65536
Mode = Literal["balanced", "sticky"]


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
    """slot_ids int64 [T, K]; expert id -1 gives slot -1.

    Balanced: pair i of the n that an expert has here, in (t, k) order, looks up the point
    ((2 i + 1) * 32768 // n + offset) mod 65536: the middle of the i-th of n equal parts. It goes to
    the replica whose interval holds the point, so replicas get their shares to within one pair.
    Sticky: the point is the top 16 bits of splitmix64(splitmix64(request) + position); `request` and
    `position` are int64 (bits of unsigned numbers), `offset` is not used.

    `real_tokens` int32 [1] on the device: rows from that one on are padding, and get slot -1.
    `load` int64 [E] is increased by the pairs of each expert, those with id -1 and padding excluded.
    """
    if real_tokens is not None:
        real_T = torch.arange(len(expert_ids_TK), device=expert_ids_TK.device) < real_tokens
        expert_ids_TK = torch.where(real_T[:, None], expert_ids_TK, -1)
    flat_P = expert_ids_TK.reshape(-1)
    if load_E is not None:
        load_E += torch.bincount(flat_P[flat_P >= 0], minlength=len(load_E))
    if mode == "sticky":
        assert request_T is not None
        assert position_T is not None
        point_P = sticky_point(request_T, position_T).repeat_interleave(expert_ids_TK.shape[1])
    else:
        point_P = _balanced_points(flat_P, offset)
    slots_P = torch.full_like(flat_P, -1)
    start = replica_start_E1.tolist()
    shares_S = cumulative_S.to(torch.int64)
    for expert in torch.unique(flat_P).tolist():
        if expert < 0:
            continue
        pairs = (flat_P == expert).nonzero().squeeze(1)
        replicas = slice(start[expert], start[expert + 1])
        holder = torch.searchsorted(shares_S[replicas].contiguous(), point_P[pairs], right=True) - 1
        slots_P[pairs] = replica_slots_S[replicas].to(torch.int64)[holder]
    return slots_P.view_as(expert_ids_TK)


def _balanced_points(flat_P: Tensor, offset: int) -> Tensor:
    points_P = torch.zeros_like(flat_P)
    for expert in torch.unique(flat_P).tolist():
        pairs = (flat_P == expert).nonzero().squeeze(1)
        index = torch.arange(len(pairs), device=flat_P.device)
        points_P[pairs] = ((2 * index + 1) * (FULL_RANGE // 2) // len(pairs) + offset) % FULL_RANGE
    return points_P


def sticky_point(request_T: Tensor, position_T: Tensor) -> Tensor:
    """int64 [T] in 0..65535: the top 16 bits of splitmix64(splitmix64(request) + position)."""
    return _shift(_splitmix64(_splitmix64(request_T) + position_T), 48)


def _splitmix64(x_T: Tensor) -> Tensor:
    """The finaliser of Steele, Lea and Flood's SplitMix64 on the bits of int64; wraps modulo 2^64."""
    z_T = x_T + _signed(0x9E3779B97F4A7C15)
    z_T = (z_T ^ _shift(z_T, 30)) * _signed(0xBF58476D1CE4E5B9)
    z_T = (z_T ^ _shift(z_T, 27)) * _signed(0x94D049BB133111EB)
    return z_T ^ _shift(z_T, 31)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _shift(x_T: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    shifted_T: Tensor = (x_T >> bits) & (2 ** (64 - bits) - 1)
    return shifted_T
