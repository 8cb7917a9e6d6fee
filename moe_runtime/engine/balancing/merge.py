"""Windows of all ranks of an instance: the sum of what each counted, once, when the last one's has come.

Nobody waits for it. Knows nothing of placements. L MoE layers, R ranks, W steps.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.balancing.wire import WindowLoads


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedWindow:
    """A window of all ranks.

    pairs_LE          int64 [L, E]
    balancedness_W    float64: of each step with rows, mean rank load / max rank load, mean over the layers
    seconds_per_pair  of expert compute; 0 if nothing was received
    """

    window: int
    pairs_LE: NDArray[np.int64]
    balancedness_W: NDArray[np.float64]
    seconds_per_pair: float


@dataclass(slots=True)
class LoadMerge:
    """Adds up the ranks' windows. A rank's window that comes twice counts once."""

    num_ranks: int
    num_layers: int
    num_experts: int
    _parts: dict[int, dict[int, WindowLoads]] = field(default_factory=dict)
    _merged: int = -1

    def add(self, loads: WindowLoads) -> MergedWindow | None:
        """The window's sum, once every rank's part is there. Raises ValueError for a part of other sizes."""
        if loads.window <= self._merged:
            return None
        if len(loads.pairs) != 8 * self.num_layers * self.num_experts:
            raise ValueError(f"rank {loads.rank} sent {len(loads.pairs)} bytes of loads")
        parts = self._parts.setdefault(loads.window, {})
        parts.setdefault(loads.rank, loads)
        if len(parts) < self.num_ranks:
            return None
        del self._parts[loads.window]
        self._merged = loads.window
        pairs = sum(np.frombuffer(p.pairs, np.int64) for p in parts.values())
        received_RWL = np.stack(
            [np.frombuffer(p.received, np.int32).reshape(-1, self.num_layers) for p in parts.values()]
        )
        rows = int(received_RWL.sum(dtype=np.int64))
        seconds = sum(p.expert_seconds for p in parts.values())
        return MergedWindow(
            window=loads.window,
            pairs_LE=np.asarray(pairs, np.int64).reshape(self.num_layers, self.num_experts),
            balancedness_W=step_balancedness(received_RWL),
            seconds_per_pair=seconds / rows if rows else 0.0,
        )


def step_balancedness(received_RWL: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64 [steps with rows]: mean rank load / max rank load, mean over the layers."""
    peak_WL = received_RWL.max(axis=0)
    busy_W = (peak_WL > 0).all(axis=1)
    value_WL = received_RWL.mean(axis=0)[busy_W] / peak_WL[busy_W]
    out: NDArray[np.float64] = value_WL.mean(axis=1)
    return out
