"""Placement: per MoE layer, which expert sits in which slot. Host side, immutable, numpy only.

L MoE layers, E experts, S slots of all ranks together, R ranks. slot = rank * slots_per_rank
+ local slot; -1 is an empty slot. The device mirror is `expert_parallel.SlotTable`.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

FULL_RANGE = 1 << 16


class PlacementError(ValueError):
    """A placement breaks an invariant; the message names layer, expert and slot or rank."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """An immutable placement.

    slot_to_expert_LS  int32 [L, S], -1 empty
    num_experts        E
    num_ranks          R; S is a multiple of R
    epoch              one counter per instance, incremented by each commit
    cumulative_LS      uint16 [L, S]: exclusive start of each slot's share of its expert's tokens,
                       in 65536ths, slots of an expert in ascending order; None means equal shares

    Raises PlacementError unless every expert has a replica, and no expert sits twice on a rank
    (unless it has more replicas than there are ranks).
    """

    slot_to_expert_LS: NDArray[np.int32]
    num_experts: int
    num_ranks: int
    epoch: int = 0
    cumulative_LS: NDArray[np.uint16] | None = None

    def __post_init__(self) -> None:
        table = np.ascontiguousarray(self.slot_to_expert_LS, dtype=np.int32)
        table.setflags(write=False)
        object.__setattr__(self, "slot_to_expert_LS", table)
        _validate(table, self.num_experts, self.num_ranks)
        if self.cumulative_LS is not None and self.cumulative_LS.shape != table.shape:
            raise PlacementError(f"split weights have shape {self.cumulative_LS.shape}, slots {table.shape}")

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
        table, E = self.slot_to_expert_LS, self.num_experts
        L, S = table.shape
        start = np.zeros((L, E + 1), np.int32)
        slots = np.full((L, S), -1, np.int32)
        for layer in range(L):
            used = np.flatnonzero(table[layer] >= 0)
            order = used[np.argsort(table[layer, used], kind="stable")]
            slots[layer, : len(order)] = order
            np.cumsum(np.bincount(table[layer, used], minlength=E), out=start[layer, 1:])
        return start, slots

    @cached_property
    def cumulative_csr(self) -> NDArray[np.uint16]:
        """uint16 [L, S] in the order of `replicas`: exclusive starts, 65536 implied at the end."""
        start, slots = self.replicas
        out = np.zeros(slots.shape, np.uint16)
        for layer in range(self.num_layers):
            if self.cumulative_LS is not None:
                used = slots[layer] >= 0
                out[layer, used] = self.cumulative_LS[layer, slots[layer, used]]
                continue
            counts = np.diff(start[layer])
            within = np.arange(start[layer, -1]) - np.repeat(start[layer, :-1], counts)
            out[layer, : len(within)] = within * FULL_RANGE // np.repeat(counts, counts)
        return out

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


def _validate(table: NDArray[np.int32], num_experts: int, num_ranks: int) -> None:
    if table.ndim != 2 or table.shape[1] % num_ranks:
        raise PlacementError(
            f"slots {table.shape} are not [layers, slots] with slots divisible by {num_ranks} ranks"
        )
    if table.size and (table.min() < -1 or table.max() >= num_experts):
        raise PlacementError(
            f"expert ids must lie in -1..{num_experts - 1}, found {table.min()}..{table.max()}"
        )
    per_rank = table.reshape(len(table), num_ranks, -1)
    for layer, ranks in enumerate(per_rank):
        counts = np.bincount(ranks[ranks >= 0], minlength=num_experts)
        if (counts == 0).any():
            raise PlacementError(f"layer {layer}: expert {int(np.argmin(counts > 0))} has no replica")
        for rank, experts in enumerate(ranks):
            ids, times = np.unique(experts[experts >= 0], return_counts=True)
            twice = ids[(times > 1) & (counts[ids] <= num_ranks)]
            if len(twice):
                raise PlacementError(f"layer {layer}: expert {int(twice[0])} sits twice on rank {rank}")
