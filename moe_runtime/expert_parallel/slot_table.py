"""SlotTable: the device mirror of a Placement, at fixed addresses, as one rank sees it.

L MoE layers, E experts, S slots. CSR: replicas of expert e are
replica_slots[l, replica_start[l, e] : replica_start[l, e+1]].
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.registry import select
from moe_runtime.models.context import StepContext
from moe_runtime.placement.placement import FULL_RANGE, Placement


class SlotTable:
    """replica_start int32 [L, E+1], replica_slots int32 [L, S], cumulative uint16 [L, S].

    `offset` shifts this rank's place in the cumulative tables, so that ranks with few tokens
    spread over the replicas instead of all meeting the same one. `load_LE` int64 [L, E] is increased by
    every pair that is given a slot.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        source_rank: int,
        device: torch.device,
        load_LE: Tensor | None = None,
    ) -> None:
        start, slots = placement.replicas
        self.epoch = placement.epoch
        # Copies: the placement stays what it is when the table is updated.
        self.replica_start = torch.tensor(start, device=device)
        self.replica_slots = torch.tensor(slots, device=device)
        self.cumulative = torch.tensor(placement.cumulative_csr, device=device)
        self.offset = source_rank * FULL_RANGE // placement.num_ranks
        self.load_LE = load_LE
        self._choose = select("choose_slots", device.type)

    def update(self, placement: Placement, layers: Sequence[int]) -> None:
        """Show these layers of another placement of the same sizes, at the same addresses."""
        start, slots = placement.replicas
        for layer in layers:
            self.replica_start[layer].copy_(torch.from_numpy(start[layer]))
            self.replica_slots[layer].copy_(torch.from_numpy(slots[layer]))
            self.cumulative[layer].copy_(torch.from_numpy(placement.cumulative_csr[layer]))
        self.epoch = placement.epoch

    def layer(self, moe_layer: int) -> "LayerSlots":
        """The view that one decoder layer is built with."""
        return LayerSlots(self, moe_layer, self._choose)


class LayerSlots:
    """One layer's tables; holds views, so an update of the table is seen at once."""

    def __init__(self, table: SlotTable, moe_layer: int, choose: Callable[..., Tensor]) -> None:
        self._start = table.replica_start[moe_layer]
        self._slots = table.replica_slots[moe_layer]
        self._cumulative = table.cumulative[moe_layer]
        self._offset = table.offset
        self._load = None if table.load_LE is None else table.load_LE[moe_layer]
        self._kernel = choose

    def choose(self, expert_ids_TK: Tensor, step: StepContext) -> Tensor:
        """Expert ids int64 [T, K] -> slot ids int64 [T, K], `balanced` mode."""
        return self._kernel(
            expert_ids_TK, self._start, self._slots, self._cumulative, self._offset, load_E=self._load
        )
