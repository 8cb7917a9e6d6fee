"""One row of the step log per forward step: what the report is made of. Pure."""

from typing import Any

import numpy as np

from moe_runtime.engine.agree import StepDecision
from moe_runtime.expert_parallel.meter import TransportTotals
from moe_runtime.scheduler.step import Scheduled
from moe_runtime.spec.limits import DISPATCH_MODES


def step_row(scheduled: Scheduled, decision: StepDecision, totals: TransportTotals) -> dict[str, Any]:
    """The columns of StepLog.append that follow from what was run and moved."""
    # One dispatch per MoE layer, micro-batch and round; those of a layer come before the next layer's.
    per_layer = decision.rounds * decision.micro_batches
    received = np.array(totals.received_rows, np.int64).reshape(-1, per_layer).sum(axis=1)
    return {
        "decode_tokens": scheduled.inputs.num_decode,
        "prefill_tokens": scheduled.prefill_tokens,
        "cached_tokens": scheduled.cached_tokens,
        "recomputed_tokens": scheduled.recomputed_tokens,
        "received_rows": received,
        "dispatch_mode": DISPATCH_MODES.index(decision.dispatch_mode),
        "rows_dispatched": totals.rows_dispatched,
        "bytes_dispatched": totals.bytes_dispatched,
        "bytes_combined": totals.bytes_combined,
        "transport_busy": totals.busy,
        "transport_waited": totals.waited,
        "micro_batches": decision.micro_batches,
        "overlap_reason": int(decision.overlap_reason),
        # A commit of moved experts comes before the forward pass of its step.
        "placement_epoch": decision.placement_epoch + (decision.move.commit > 0),
    }
