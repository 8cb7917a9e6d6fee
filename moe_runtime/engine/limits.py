"""What a deployment of a plan means for a rank's control plane: the one place where both are known. Pure.

Used by ranks and by the virtual cluster alike, so that both run under the same numbers.
"""

from moe_runtime.engine.agree import AgreeLimits
from moe_runtime.plan.effective import EffectiveDeployment, EffectiveSlo
from moe_runtime.scheduler.budget import ChunkBudget
from moe_runtime.scheduler.step import SchedulerLimits

LEASE_SECONDS = 60.0
"""A decode rank that wants a lease renews it within this time."""


def agree_limits(deployment: EffectiveDeployment) -> AgreeLimits:
    """What ranks of an instance agree under."""
    s = deployment.scheduler
    return AgreeLimits(
        max_batch_tokens=s.max_batch_tokens,
        chunk_tokens=s.chunk_tokens,
        dispatch_max_tokens=deployment.dispatch.max_tokens,
        dispatch_mode=deployment.dispatch.mode,
        micro_batches=deployment.overlap.micro_batches,
        prefill_delay_steps=s.prefill_delay_steps,
    )


def scheduler_limits(
    deployment: EffectiveDeployment, *, max_positions: int, model: str = ""
) -> SchedulerLimits:
    """One rank's; `model` tells apart models whose KV must not be mixed up.

    Whoever fetches KV leaves out what the prefix cache has.
    """
    s, kv = deployment.scheduler, deployment.kv_cache
    return SchedulerLimits(
        max_batch_tokens=s.max_batch_tokens,
        max_sequences=s.max_sequences,
        chunk_tokens=s.chunk_tokens,
        attention_span=s.attention_span,
        block_tokens=kv.block_tokens,
        num_blocks=kv.blocks,
        max_positions=max_positions,
        prefix_cache=kv.prefix_cache,
        reuse_pulled=True,
        model=model,
    )


def chunk_budget(deployment: EffectiveDeployment, slo: EffectiveSlo) -> ChunkBudget | None:
    """A new budget that keeps steps within the objective; None where chunks are as long as they are."""
    return ChunkBudget(slo.tpot_ms / 1e3) if deployment.scheduler.chunk_budget == "tpot" else None
