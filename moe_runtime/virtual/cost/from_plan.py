"""From a plan's deployment to what the cost model needs of it."""

from moe_runtime.plan.effective import EffectiveCluster, EffectiveDeployment
from moe_runtime.virtual.cost.deployment import Precision, Setting


def plan_setting(
    cluster: EffectiveCluster,
    deployment: EffectiveDeployment,
    *,
    weights: str,
    library: str | None = None,
) -> Setting:
    """One instance of a deployment. `weights`: dtype of dense and expert weights, as
    `ModelSpec.weight_dtype` has it.

    Rows go out in the dispatch dtype and come back in bfloat16, attention computes in bfloat16 (float32
    with float32 weights). InputError for sizes that cannot be.
    """
    wide = "float32" if weights == "float32" else "bfloat16"
    return Setting(
        machine=cluster.hardware,
        ranks=deployment.expert_parallel,
        ranks_per_node=min(cluster.ranks_per_node, deployment.expert_parallel),
        slots_per_rank=deployment.slots_per_rank,
        tensor_parallel=deployment.attention.tensor_parallel,
        library=library,
        precision=Precision(
            dense=weights,
            experts=weights,
            attention=wide,
            cache=deployment.kv_cache.dtype,
            dispatch=deployment.dispatch.dtype,
            combine=wide,
            head=wide,
        ),
    )
