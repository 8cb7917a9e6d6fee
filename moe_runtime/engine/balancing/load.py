"""Expert loads: what a rank counts, the windows it is cut into, and their sum over the ranks.

A window ends at the step in which the instance has agreed on `interval_tokens` more rows, so all ranks cut
at the same step without asking. Rank 0 adds up what each sends, once, when the last one's has come: nobody
waits. Knows nothing of placements. L MoE layers, E experts, R ranks.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.engine.balancing.wire import WindowLoads

MAX_STEPS = 4096  # of a window, whose received rows are kept


class ExpertLoad:
    """One rank's counter, which `choose_slots` adds to and nobody takes from: readers take differences."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.counter_LE: Tensor = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._start_LE = self.pairs_LE
        self._kept_LE: NDArray[np.int64] | None = None

    def reset(self) -> None:
        """Forget what warm-up counted."""
        self.counter_LE.zero_()
        self.start()

    @property
    def pairs_LE(self) -> NDArray[np.int64]:
        """int64 [L, E]: all pairs of real tokens that were routed here so far."""
        return self.counter_LE.cpu().numpy().copy()

    def start(self) -> None:
        """Record from here on."""
        self._start_LE, self._kept_LE = self.pairs_LE, None

    def stop(self) -> None:
        """Record no more; what was recorded stays."""
        self._kept_LE = self.recorded_LE

    @property
    def recorded_LE(self) -> NDArray[np.int64]:
        """int64 [L, E]: pairs recorded since `start`, or between `start` and `stop`."""
        return self.pairs_LE - self._start_LE if self._kept_LE is None else self._kept_LE


class WindowMeter:
    """Cuts one rank's counts into windows. `interval_tokens` may change between steps, on all ranks alike."""

    def __init__(self, load: ExpertLoad, *, rank: int, interval_tokens: int) -> None:
        self._load, self._rank, self.interval_tokens = load, rank, interval_tokens
        self._window = self._tokens = 0
        self._seconds = 0.0
        self._received: list[NDArray[np.int64]] = []
        self._before_LE = load.pairs_LE

    def after_step(
        self, *, rows: int, received_L: NDArray[np.int64], expert_seconds: float
    ) -> WindowLoads | None:
        """Count a step of `rows` agreed rows of all ranks together; the window that it ends, if it does."""
        self._tokens += rows
        self._seconds += expert_seconds
        if len(self._received) < MAX_STEPS:
            self._received.append(received_L)
        if self._tokens < self.interval_tokens:
            return None
        now_LE = self._load.pairs_LE
        loads = WindowLoads(
            rank=self._rank,
            window=self._window,
            pairs=(now_LE - self._before_LE).tobytes(),
            received=np.stack(self._received).astype(np.int32).tobytes(),
            expert_seconds=self._seconds,
        )
        self._window, self._tokens, self._seconds = self._window + 1, 0, 0.0
        self._received, self._before_LE = [], now_LE
        return loads


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
