"""What the solver answers: a placement, its certificate, and what it costs to get there."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_runtime.placement.migration import MigrationPlan
from moe_runtime.placement.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A placement with proven quality. Loads are in the caller's units, per layer.

    placement        slots, split weights, epoch
    peak_L           largest rank load: with the split weights as they are quantised, or with equal shares in
                     layers where weights gain nothing (a third is 1e-5 off in 65536ths)
    peak_equal_L     largest rank load of the same slots if replicas share equally
    mean_L           mean rank load
    bound_L          no plan with as many slots, whatever its split, has a smaller peak
    reason_L         which argument proves the bound: "mean", "replicas" or "crowding" (see `bound`)
    node_by_node_L   whether each node holds whole groups of experts
    moves            from `current`, if one was given
    before_L         peak of `current` under the same loads, with its own split weights
    saved_seconds    horizon x (before_L - peak_L), summed; NaN without current or horizon
    """

    placement: Placement
    peak_L: NDArray[np.float64]
    peak_equal_L: NDArray[np.float64]
    mean_L: NDArray[np.float64]
    bound_L: NDArray[np.float64]
    reason_L: tuple[str, ...]
    node_by_node_L: NDArray[np.bool_]
    moves: MigrationPlan | None
    before_L: NDArray[np.float64] | None
    saved_seconds: float

    @property
    def gap_L(self) -> NDArray[np.float64]:
        """Relative distance of the peak to the bound; 0 where there is no load."""
        return np.where(self.bound_L > 0, self.peak_L / np.where(self.bound_L > 0, self.bound_L, 1) - 1, 0.0)

    @property
    def balancedness_L(self) -> NDArray[np.float64]:
        """Mean over peak, in (0, 1]; 1 where there is no load."""
        return np.where(self.peak_L > 0, self.mean_L / np.where(self.peak_L > 0, self.peak_L, 1), 1.0)

    @property
    def balancedness_equal_L(self) -> NDArray[np.float64]:
        """Mean over peak if replicas share equally."""
        peak = self.peak_equal_L
        return np.where(peak > 0, self.mean_L / np.where(peak > 0, peak, 1), 1.0)

    @property
    def moved_bytes(self) -> float:
        return 0.0 if self.moves is None else self.moves.total_bytes

    @property
    def move_seconds(self) -> float:
        return 0.0 if self.moves is None else self.moves.seconds

    def summary(self) -> dict[str, Any]:
        """The solution in numbers, JSON-ready."""
        return {
            "layers": self.placement.num_layers,
            "experts": self.placement.num_experts,
            "slots": self.placement.num_slots,
            "ranks": self.placement.num_ranks,
            "digest": self.placement.digest,
            "balancedness_mean": float(self.balancedness_L.mean()),
            "balancedness_worst": float(self.balancedness_L.min()),
            "balancedness_equal_split_mean": float(self.balancedness_equal_L.mean()),
            "gap_mean": float(self.gap_L.mean()),
            "gap_worst": float(self.gap_L.max()),
            "layers_within_1_percent": int((self.gap_L < 0.01).sum()),
            "moved_bytes": self.moved_bytes,
            "move_seconds": self.move_seconds,
        }
