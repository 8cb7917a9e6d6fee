"""Expert loads: what a rank counts, and the windows it is cut into.

A window ends at the step in which the instance has agreed on `interval_tokens` more rows, so all ranks cut
at the same step without asking. Knows nothing of placements. L MoE layers, E experts.
"""

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
