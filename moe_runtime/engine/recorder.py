"""One row of the step log per forward step: what the report is made of."""

from typing import TYPE_CHECKING

import numpy as np

from moe_runtime.engine.agree import StepDecision
from moe_runtime.scheduler.scheduler import Scheduled

if TYPE_CHECKING:
    from moe_runtime.engine.rank import RankEngine


def record_step(engine: "RankEngine", scheduled: Scheduled, decision: StepDecision) -> None:
    """LOCAL: close the step's clock and append its row."""
    totals = engine.meter.take()
    # One dispatch per MoE layer and round, layer by layer.
    rows = np.array(totals.received_rows, np.int64).reshape(-1, decision.rounds).sum(axis=1)
    engine.desk.log.append(
        step=engine.step_number,
        start=engine.clock.start,
        wall=engine.clock.end(),
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
    )
