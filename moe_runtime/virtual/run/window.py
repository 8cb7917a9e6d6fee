"""Window: what the ranks of an instance would have counted: the rows of its steps times the expert loads.

Owns the noise of counting. Loads stray as the cost model has it (`cost.balance.Drift`): what all sequences
share is new in every step, what a sequence adds stays with it, and tokens choose at random. Seeded. L MoE
layers, E experts.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from moe_runtime.engine.balancing.merge import MergedWindow
from moe_runtime.report.records import F64
from moe_runtime.virtual.cluster.records import StepRun
from moe_runtime.virtual.run.loads import Assumed

NEVER = 1 << 62


@dataclass(slots=True, kw_only=True)
class WindowCounter:
    """Cuts the steps of one instance into windows of `interval` agreed rows; None: it ends on demand only.

    assumed  what does not change in time: ranks, experts of a token, how far loads stray
    """

    assumed: Assumed
    interval: int | None
    random: np.random.Generator
    _load_LE: F64 | None = None
    _mean_LE: F64 | None = None
    _rows: int = 0
    _tokens: float = 0.0
    _steps: int = 0
    _all_tokens: float = 0.0
    _seconds: float = 0.0
    _window: int = 0
    _nothing: F64 = field(init=False)

    def __post_init__(self) -> None:
        self._nothing = np.zeros_like(self.assumed.load_LE)

    def steps_left(self, rows: int) -> int:
        """Steps of so many rows with the last of which the window is full, at least 1."""
        if self.interval is None or not rows:
            return NEVER
        return max(1, math.ceil((self.interval - self._rows) / rows))

    def count(self, run: StepRun, load_LE: F64) -> bool:
        """Steps run under these loads; whether the window is full."""
        if load_LE is not self._load_LE:
            self._settle()
            self._load_LE = load_LE
        rows = int(np.add.reduce(run.decode_R) * run.steps + np.add.reduce(run.prefill_R + run.recomputed_R))
        self._tokens += rows
        self._all_tokens += rows
        self._rows += run.decision.rows * run.steps
        self._steps += run.steps
        self._seconds += run.cost.parts["experts"]
        return self.interval is not None and self._rows >= self.interval

    def close(self) -> MergedWindow:
        """The window so far, and begin the next."""
        self._settle()
        mean_LE = self._nothing if self._mean_LE is None else self._mean_LE
        pairs_LE = self._noisy(mean_LE)
        pairs = float(mean_LE.sum())
        merged = MergedWindow(
            window=self._window,
            pairs_LE=pairs_LE,
            balancedness_W=np.zeros(0),
            seconds_per_pair=self._seconds * self.assumed.placement.num_ranks / pairs if pairs else 0.0,
        )
        self._window, self._mean_LE = self._window + 1, None
        self._rows = self._steps = 0
        self._all_tokens = self._seconds = 0.0
        return merged

    # -- inside -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Turn tokens since the loads changed into pairs."""
        if self._load_LE is not None and self._tokens:
            share_LE = self._load_LE / self._load_LE.sum(axis=1, keepdims=True)
            pairs_LE = share_LE * (self._tokens * self.assumed.top_k)
            self._mean_LE = pairs_LE if self._mean_LE is None else self._mean_LE + pairs_LE
        self._tokens = 0.0

    def _noisy(self, mean_LE: F64) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        if not mean_LE.any():
            return np.zeros(mean_LE.shape, np.int64)
        a, tokens = self.assumed, self._all_tokens
        at_once = tokens / self._steps / a.tokens_per_sequence
        drift = replace(a.drift, common=a.drift.common / math.sqrt(self._steps))
        strays = drift.of(max(at_once, tokens / a.tokens_of_sequence))
        noisy_LE = mean_LE * np.exp(strays * self.random.standard_normal(mean_LE.shape))
        noisy_LE *= mean_LE.sum(axis=1, keepdims=True) / noisy_LE.sum(axis=1, keepdims=True)
        return self.random.poisson(noisy_LE)
