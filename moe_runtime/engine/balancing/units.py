"""Units of a rebalance: what is staged and committed together, in which order. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.placement import Placement
from moe_runtime.placement.stages import layers_that_differ


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that are committed together; moves int64 [3, M] of the first: layer, slot, source slot."""

    layers: tuple[int, ...]
    moves_3M: NDArray[np.int64]


def units_of(current: Placement, target: Placement, moves_3M: NDArray[np.int64]) -> list[Unit]:
    """The units of an attempt, in order; empty where the placements are alike.

    `moves` int64 [3, M] as `plan_migration` gives them, sorted by layer.
    """
    moved, split = layers_that_differ(current, target)
    nothing = np.zeros((3, 0), np.int64)
    first = [Unit(tuple(split), nothing)] if split else []
    return first + [Unit((layer,), moves_3M[:, moves_3M[0] == layer]) for layer in moved]
