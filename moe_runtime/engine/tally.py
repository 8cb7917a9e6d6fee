"""Tally: what one rank has done since it started, and the status it makes of it. LOCAL.

A few additions per step; encoding and sending happen only for frontends that asked (`Watch`).
"""

import bisect
from typing import Any

import numpy as np

from moe_runtime.engine.messages import ROWS_BUCKETS, RankTotals
from moe_runtime.report.records import OVERLAP_REASONS, PHASES
from moe_runtime.spec.limits import DISPATCH_MODES


class Tally:
    """Sums over the steps of one rank; see RankTotals for what each means."""

    def __init__(self, num_moe_layers: int) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._phases = np.zeros(len(PHASES))
        self._decode_rows = self._prefill_rows = 0
        self._new = self._cached = self._recomputed = 0
        self._preemptions = 0
        self._fill = 0.0
        self._received = np.zeros(num_moe_layers, np.int64)
        self._histogram = [0] * (len(ROWS_BUCKETS) + 1)
        self._modes, self._reasons = [0] * len(DISPATCH_MODES), [0] * len(OVERLAP_REASONS)
        self.output_tokens = self.pulled_tokens = self.reused_tokens = 0
        self.chunk_tokens = 0

    def add(self, row: dict[str, Any], *, step_fill: float, chunk_tokens: int) -> None:
        """One step: its row of the step log, its fill, and the prefill rows it was allowed."""
        prefill = row["prefill_tokens"] + row["recomputed_tokens"]
        self._steps += 1
        self._seconds += row["wall"]
        self._phases += row["phases"]
        self._decode_rows += row["decode_tokens"]
        self._prefill_rows += prefill
        self._new += row["prefill_tokens"]
        self._cached += row["cached_tokens"]
        self._recomputed += row["recomputed_tokens"]
        self._preemptions += row["preemptions"]
        self._fill += step_fill
        self._received += row["received_rows"]
        self._histogram[bisect.bisect_left(ROWS_BUCKETS, row["decode_tokens"] + prefill)] += 1
        self._modes[row["dispatch_mode"]] += 1
        self._reasons[row["overlap_reason"]] += 1
        self.chunk_tokens = chunk_tokens

    def totals(self) -> RankTotals:
        """The sums so far."""
        return RankTotals(
            steps=self._steps,
            step_seconds=self._seconds,
            phase_seconds=self._phases.tolist(),
            decode_rows=self._decode_rows,
            prefill_rows=self._prefill_rows,
            new_prefill_tokens=self._new,
            cached_prefill_tokens=self._cached,
            recomputed_tokens=self._recomputed,
            output_tokens=self.output_tokens,
            pulled_tokens=self.pulled_tokens,
            reused_tokens=self.reused_tokens,
            preemptions=self._preemptions,
            step_fill=self._fill,
            received_rows=self._received.tolist(),
            rows_histogram=list(self._histogram),
            dispatch_modes=list(self._modes),
            overlap_reasons=list(self._reasons),
        )
