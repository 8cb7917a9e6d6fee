"""One row of the step log per forward step: what the report is made of."""

from typing import TYPE_CHECKING

import numpy as np

from moe_runtime.engine.agree import StepDecision
from moe_runtime.report.records import PHASES
from moe_runtime.scheduler.scheduler import Scheduled

if TYPE_CHECKING:
    from moe_runtime.engine.rank import RankEngine


def record_step(engine: "RankEngine", scheduled: Scheduled, decision: StepDecision) -> None:
    """LOCAL: close the step's clock and append its row."""
    totals = engine.meter.take()
    # One dispatch per MoE layer, micro-batch and round; those of a layer come before the next layer's.
    per_layer = decision.rounds * decision.micro_batches
    rows = np.array(totals.received_rows, np.int64).reshape(-1, per_layer).sum(axis=1)
    wall = engine.clock.end()
    waiting = engine.clock.seconds[PHASES.index("waiting")]
    engine.overlap.observe(
        tokens=scheduled.inputs.num_tokens,
        micro_batches=decision.micro_batches,
        busy=wall - waiting,
        compute=wall - waiting - totals.waited,
        transport=totals.busy,
    )
    engine.desk.log.append(
        step=engine.step_number,
        start=engine.clock.start,
        wall=wall,
        phases=engine.clock.seconds,
        decode_tokens=scheduled.inputs.num_decode,
        prefill_tokens=scheduled.prefill_tokens,
        cached_tokens=0,
        recomputed_tokens=scheduled.recomputed_tokens,
        received_rows=rows,
        kv_used_blocks=engine.scheduler.pool.num_used,
        preemptions=engine.scheduler.take_preemptions(),
        bytes_dispatched=totals.bytes_dispatched,
        bytes_combined=totals.bytes_combined,
        transport_busy=totals.busy,
        transport_waited=totals.waited,
        micro_batches=decision.micro_batches,
        overlap_reason=int(decision.overlap_reason),
    )
