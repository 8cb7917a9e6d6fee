"""Batch: one micro-batch of a step, and the rank that is last to send its rows.

Owns what ranks compute before the first transfer of a layer, vectorised over ranks. Knows no transfer.
"""

import numpy as np

from moe_runtime.virtual.cost.account import Account
from moe_runtime.virtual.cost.shapes import StepShape
from moe_runtime.virtual.cost.tables import RowTables
from moe_runtime.virtual.cost.work import Work


class Batch:
    """Seconds per layer of one micro-batch.

    most, total    rows of the rank with most, rows of all attention groups together
    slowest, mean  seconds until rows leave, of the last rank and of the mean one
    first          up to the attention core, of the last rank to leave
    With two micro-batches of decode, the other one's experts run between the two stages: the last rank is
    waited for at the end of each, and `slowest` is the sum of both.
    """

    __slots__ = (
        "_own",
        "core",
        "extra",
        "first",
        "mean",
        "most",
        "parts",
        "phase",
        "rows",
        "slowest",
        "total",
    )

    def __init__(self, shape: StepShape, tables: RowTables) -> None:
        split = shape.micro_batches
        rows_R = np.ceil(shape.tokens_R / split).astype(np.int64)
        decode_R = np.ceil(shape.decode_sequences_R * (shape.queries / split)).astype(np.int64)
        self.most = int(rows_R.max())
        tables.need(self.most)
        self.total = float(shape.tokens_R.sum()) / split
        core = tables.core(shape.queries)
        phase_R = tables.absorb_N[decode_R]
        core_R = shape.decode_context_R * (float(core.seconds) / split)
        prefill = bool(shape.prefill_tokens_R.any())
        if prefill:
            cached_R = (shape.prefill_tokens_R + shape.prefill_prefix_R) / split
            pairs = tables.kernels.prefill_core(shape.prefill_pairs_R, shape.prefill_tokens_R)
            phase_R = phase_R + tables.expand(cached_R)
            core_R += pairs.seconds / split
        before_R = tables.before_N[rows_R] + phase_R + core_R
        worst = int(before_R.argmax())
        self.rows = int(rows_R[worst])
        self._own, self.mean = float(before_R[worst]), float(before_R.mean())
        self.parts = tables.at(self.rows)
        self.core = core.times(float(shape.decode_context_R[worst]) / split)
        self.phase = tables.absorb(int(decode_R[worst]))
        self.extra = Work()
        if prefill:
            self._add_prefill(shape, tables, worst)
        if split == 2 and shape.mode == "low_latency":
            first_R = tables.first_N[rows_R] + phase_R
            self.first = float(first_R.max())
            self.slowest = self.first + float((before_R - first_R).max())
        else:
            self.first = self.parts.first + float(self.phase.seconds + self.extra.seconds)
            self.slowest = self._own

    def _add_prefill(self, shape: StepShape, tables: RowTables, worst: int) -> None:
        split, kernels = shape.micro_batches, tables.kernels
        tokens = float(shape.prefill_tokens_R[worst]) / split
        cached = tokens + float(shape.prefill_prefix_R[worst]) / split
        if cached > 0:
            self.phase = self.phase.plus(kernels.expand(cached))
            self.extra = kernels.assemble(cached)
        pairs = float(shape.prefill_pairs_R[worst]) / split
        self.core = self.core.plus(kernels.prefill_core(pairs, tokens))

    def account(self, account: Account, times: float) -> None:
        """What a mean rank computes before its rows leave, and what it waits for the last one."""
        own = times * self.mean / self._own
        account.work("dense", self.parts.dense.plus(self.phase), own)
        account.work("attention", self.core, own)
        account.work("router", self.parts.router, own)
        account.work("other", self.parts.other.plus(self.extra), own)
        account.wait(self.slowest - self.mean, times)
