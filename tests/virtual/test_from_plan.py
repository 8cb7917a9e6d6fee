"""A plan's deployments as the cost model sees them."""

from moe_runtime.spec.catalog import DEEPSEEK_V3
from moe_runtime.virtual.cost.from_plan import plan_setting
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.shapes import decode_step, prefill_step
from tests.plan.plans import effective

PLAN = """
model: {path: nowhere, dtype: bfloat16}
cluster: {nodes: 22, ranks_per_node: 8, device: cuda, hardware: h800}
deployments:
  prefill: {instances: 1, expert_parallel: 32, redundant_experts: 32}
  decode: {instances: 1, expert_parallel: 144, redundant_experts: 32}
"""


def test_a_plan_of_four_and_eighteen_nodes_has_step_times(tmp_path):
    plan = effective(tmp_path, PLAN, model=DEEPSEEK_V3)
    settings = {d.name: plan_setting(plan.cluster, d, weights="float8_e4m3") for d in plan.deployments}
    decode, prefill = settings["decode"], settings["prefill"]
    assert (decode.ranks, decode.slots_per_rank, decode.nodes) == (144, 2, 18)
    assert (prefill.ranks, prefill.slots_per_rank, prefill.nodes) == (32, 9, 4)
    assert decode.machine == "h800"
    step = CostModel(DEEPSEEK_V3, decode).step(decode_step(144, 64, 3000))
    chunk = CostModel(DEEPSEEK_V3, prefill).step(prefill_step(32, 8192, 2048))
    assert 0.02 < step.seconds < 0.08
    assert 0.5 < chunk.seconds < 2.0
    narrow = plan_setting(plan.cluster, plan.deployments[1], weights="bfloat16")
    assert CostModel(DEEPSEEK_V3, narrow).step(decode_step(144, 64, 3000)).seconds > step.seconds
