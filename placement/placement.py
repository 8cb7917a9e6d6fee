"""Placement: per MoE layer, which expert sits in which slot. Host side, immutable, numpy only.

L MoE layers, E experts, S slots of all ranks together, R ranks. slot = rank * slots_per_rank
+ local slot; -1 is an empty slot. The device mirror is `expert_parallel.SlotTable`.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.errors import PlacementError
from moe_runtime.placement.topology import Topology

FULL_RANGE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Placement:
    """An immutable placement.

    slot_to_expert_LS  int32 [L, S], -1 empty
    num_experts        E
    num_ranks          R; S is a multiple of R
    epoch              one counter per instance, incremented by each commit
    cumulative_LS      uint16 [L, S]: exclusive start of each slot's share of its expert's tokens,
                       in 65536ths, slots of an expert in ascending order; None means equal shares
    topology           nodes and links the ranks belong to, where known; no part of the digest

    Raises PlacementError unless every expert has a replica, no expert sits twice on a rank (unless it has
    more replicas than there are ranks), and split weights start at 0 and do not fall.
    """

    slot_to_expert_LS: NDArray[np.int32]
    num_experts: int
    num_ranks: int
    epoch: int = 0
    cumulative_LS: NDArray[np.uint16] | None = None
    topology: Topology | None = None

    def __post_init__(self) -> None:
        table = np.ascontiguousarray(self.slot_to_expert_LS, dtype=np.int32)
        table.setflags(write=False)
        object.__setattr__(self, "slot_to_expert_LS", table)
        _validate(table, self.num_experts, self.num_ranks)
        if self.topology is not None and self.topology.num_ranks != self.num_ranks:
            raise PlacementError(f"topology {self.topology} is not of {self.num_ranks} ranks")
        if self.cumulative_LS is not None:
            cumulative = np.ascontiguousarray(self.cumulative_LS, dtype=np.uint16)
            cumulative.setflags(write=False)
            object.__setattr__(self, "cumulative_LS", cumulative)
            if cumulative.shape != table.shape:
                raise PlacementError(f"split weights have shape {cumulative.shape}, slots {table.shape}")
            _validate_split(self)

    @property
    def num_layers(self) -> int:
        return len(self.slot_to_expert_LS)

    @property
    def num_slots(self) -> int:
        return int(self.slot_to_expert_LS.shape[1])

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    def local_experts(self, layer: int, rank: int) -> NDArray[np.int32]:
        """int32 [slots_per_rank]: experts of a rank's slots in a MoE layer, -1 empty."""
        n = self.slots_per_rank
        return self.slot_to_expert_LS[layer, rank * n : (rank + 1) * n]

    @cached_property
    def replicas(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The compact inverse (CSR): `start [L, E+1]` and `slots [L, S]`, both int32.

        Slots of expert e in layer l are slots[l, start[l, e] : start[l, e+1]], ascending;
        unused entries at the end of a row are -1.
        """
        table = self.slot_to_expert_LS
        kind = np.uint16 if self.num_experts < 1 << 16 else table.dtype  # 16 bits are sorted digit by digit
        key = np.where(table < 0, self.num_experts, table).astype(kind)
        order = np.argsort(key, axis=1, kind="stable")
        slots = np.where(np.take_along_axis(table, order, axis=1) < 0, -1, order).astype(np.int32)
        start = np.zeros((self.num_layers, self.num_experts + 1), np.int32)
        np.cumsum(self.replica_counts, axis=1, out=start[:, 1:])
        return start, slots

    @cached_property
    def replica_counts(self) -> NDArray[np.int64]:
        """int64 [L, E]: replicas of each expert."""
        return count_experts(self.slot_to_expert_LS, self.num_experts)

    @cached_property
    def cumulative_csr(self) -> NDArray[np.uint16]:
        """uint16 [L, S] in the order of `replicas`: exclusive starts, 65536 implied at the end."""
        start, slots = self.replicas
        used = slots >= 0
        if self.cumulative_LS is not None:
            starts = np.take_along_axis(self.cumulative_LS, np.maximum(slots, 0), axis=1)
            return np.where(used, starts, 0).astype(np.uint16)
        experts = np.where(used, np.take_along_axis(self.slot_to_expert_LS, np.maximum(slots, 0), axis=1), 0)
        within = np.arange(self.num_slots) - np.take_along_axis(start, experts, axis=1)
        equal = within * FULL_RANGE // np.take_along_axis(self.replica_counts, experts, axis=1)
        return np.where(used, equal, 0).astype(np.uint16)

    @cached_property
    def share_LS(self) -> NDArray[np.int64]:
        """int64 [L, S]: each slot's share of its expert's tokens in 65536ths; 0 in empty slots."""
        start, slots = self.replicas
        used = slots >= 0
        begin = self.cumulative_csr.astype(np.int64)
        end = np.concatenate([begin[:, 1:], np.zeros((self.num_layers, 1), np.int64)], axis=1)
        layer = np.arange(self.num_layers)[:, None]
        end[layer, start[:, 1:] - 1] = FULL_RANGE  # the last replica of every expert
        out = np.zeros(slots.shape, np.int64)
        rows, places = np.nonzero(used)
        out[rows, slots[rows, places]] = (end - begin)[rows, places]
        return out

    def rank_load(self, load_LE: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [L, R]: what each rank carries of the experts' loads [L, E], by the split weights."""
        padded = np.concatenate([load_LE, np.zeros((len(load_LE), 1))], axis=1)
        carried = np.take_along_axis(padded, self.slot_to_expert_LS, axis=1) * (self.share_LS / FULL_RANGE)
        load: NDArray[np.float64] = carried.reshape(self.num_layers, self.num_ranks, -1).sum(axis=2)
        return load

    @cached_property
    def digest(self) -> str:
        """16 hex digits over experts, split weights and sizes; equal on all ranks or nothing starts."""
        h = hashlib.blake2b(digest_size=8)
        h.update(np.array([self.num_experts, self.num_ranks, self.epoch], np.int64).tobytes())
        h.update(self.slot_to_expert_LS.tobytes())
        h.update(self.cumulative_csr.tobytes())
        return h.hexdigest()


def slots_per_rank(num_experts: int, redundant_experts: int, num_ranks: int) -> int:
    """Slots every rank has: enough for its share of E + redundant_experts."""
    return -(-(num_experts + redundant_experts) // num_ranks)


def linear(*, num_layers: int, num_experts: int, num_ranks: int, redundant_experts: int = 0) -> Placement:
    """Experts 0..E-1, then 0..redundant-1 again, laid out rank by rank.

    Each rank gets floor or ceil of (E + redundant) / R experts; a surplus slot is its last, -1.
    """
    total = num_experts + redundant_experts
    per_rank = slots_per_rank(num_experts, redundant_experts, num_ranks)
    row = np.full(num_ranks * per_rank, -1, np.int32)
    taken = 0
    for rank in range(num_ranks):
        count = total // num_ranks + (rank < total % num_ranks)
        row[rank * per_rank : rank * per_rank + count] = np.arange(taken, taken + count) % num_experts
        taken += count
    return Placement(
        slot_to_expert_LS=np.tile(row, (num_layers, 1)), num_experts=num_experts, num_ranks=num_ranks
    )


def count_experts(slot_to_expert_LS: NDArray[np.int32], num_experts: int) -> NDArray[np.int64]:
    """int64 [L, E]: slots of each expert."""
    L = len(slot_to_expert_LS)
    table = slot_to_expert_LS.astype(np.int64)
    flat = np.where(table < 0, num_experts, table) + (np.arange(L) * (num_experts + 1))[:, None]
    counts = np.bincount(flat.reshape(-1), minlength=L * (num_experts + 1))
    return counts.reshape(L, num_experts + 1)[:, :num_experts]


def _validate(table: NDArray[np.int32], num_experts: int, num_ranks: int) -> None:
    if table.ndim != 2 or num_ranks < 1 or table.shape[1] % num_ranks:
        raise PlacementError(
            f"slots {table.shape} are not [layers, slots] with slots divisible by {num_ranks} ranks"
        )
    if table.size and (table.min() < -1 or table.max() >= num_experts):
        layer, slot = (int(i) for i in np.argwhere((table < -1) | (table >= num_experts))[0])
        raise PlacementError(
            f"layer {layer}, slot {slot}: expert ids must lie in -1..{num_experts - 1},"
            f" found {table[layer, slot]}"
        )
    counts = count_experts(table, num_experts)
    if (counts == 0).any():
        layer, expert = (int(i) for i in np.argwhere(counts == 0)[0])
        raise PlacementError(f"layer {layer}: expert {expert} has no replica")
    ordered = np.sort(table.reshape(len(table), num_ranks, table.shape[1] // num_ranks), axis=2)
    twins = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twins.any():
        for layer, rank, place in np.argwhere(twins):
            expert = int(ordered[layer, rank, place])
            if counts[layer, expert] <= num_ranks:
                raise PlacementError(f"layer {layer}: expert {expert} sits twice on rank {rank}")


def _validate_split(placement: Placement) -> None:
    """Exclusive starts of an expert begin at 0 and do not fall."""
    start, slots = placement.replicas
    cumulative = placement.cumulative_csr.astype(np.int64)
    layer = np.arange(placement.num_layers)[:, None]
    first = np.zeros(slots.shape, bool)
    first[layer, start[:, :-1]] = True
    falling = (np.diff(cumulative, axis=1, prepend=0) < 0) & (slots >= 0)
    wrong = np.where(first, cumulative != 0, falling)
    if wrong.any():
        row, place = (int(i) for i in np.argwhere(wrong)[0])
        slot = int(slots[row, place])
        expert = int(placement.slot_to_expert_LS[row, slot])
        raise PlacementError(
            f"layer {row}, slot {slot}: split weights of expert {expert} must start at 0 and not fall"
        )
