"""From one placement to another in stages, each a whole placement: some layers at a time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.placement import Placement


def starts_by_slot(placement: Placement) -> NDArray[np.uint16]:
    """uint16 [L, S]: the exclusive start of each slot's share, as `Placement.cumulative_LS`, never None."""
    if placement.cumulative_LS is not None:
        return np.where(placement.slot_to_expert_LS >= 0, placement.cumulative_LS, np.uint16(0))
    _, slots = placement.replicas
    rows, places = np.nonzero(slots >= 0)
    out = np.zeros(slots.shape, np.uint16)
    out[rows, slots[rows, places]] = placement.cumulative_csr[rows, places]
    return out


def with_layers(current: Placement, target: Placement, layers: Sequence[int]) -> Placement:
    """`current` with these layers as in `target`, one epoch later. Raises PlacementError."""
    table, starts = current.slot_to_expert_LS.copy(), starts_by_slot(current)
    index = np.asarray(layers, np.int64)
    table[index] = target.slot_to_expert_LS[index]
    starts[index] = starts_by_slot(target)[index]
    return replace(current, slot_to_expert_LS=table, cumulative_LS=starts, epoch=current.epoch + 1)


def layers_that_differ(current: Placement, target: Placement) -> tuple[list[int], list[int]]:
    """(layers with other experts in some slot, layers of which only the split weights differ), ascending."""
    moved = (current.slot_to_expert_LS != target.slot_to_expert_LS).any(axis=1)
    split = (starts_by_slot(current) != starts_by_slot(target)).any(axis=1) & ~moved
    return np.flatnonzero(moved).tolist(), np.flatnonzero(split).tolist()
