"""The step's plans for paged attention: made by the first layer that asks, reused by the others."""

from typing import Any

from moe_runtime.models.context import StepContext
from moe_runtime.models.ops import Ops


def decode_plan(step: StepContext, ops: Ops, layer: int) -> Any:
    """Opaque plan for the rows [0, num_decode)."""
    plan = step.memo.get("decode_plan")
    if plan is None:
        plan = step.memo["decode_plan"] = ops.plan_decode(
            step.decode_blocks_DB,
            step.decode_context_D,
            max_context=step.max_context,
            block_tokens=step.kv_cache[layer].shape[1],
        )
    return plan


def prefill_plan(step: StepContext, ops: Ops, layer: int) -> Any:
    """Opaque plan for the rows of the segments."""
    plan = step.memo.get("prefill_plan")
    if plan is None:
        plan = step.memo["prefill_plan"] = ops.plan_prefill(
            step.segments, block_tokens=step.kv_cache[layer].shape[1]
        )
    return plan
