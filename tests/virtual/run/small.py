"""A plan of eight H100 and a trace, small enough to simulate in a blink."""

from dataclasses import replace

import numpy as np

from moe_runtime.placement.placement import Placement, linear
from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cost.balance import Drift
from moe_runtime.virtual.run.course import LoadShift
from moe_runtime.virtual.run.loads import Assumed, LoadChoice
from moe_runtime.virtual.run.prepare import Prepared, Workload, prepare
from tests.plan.plans import effective
from tests.spec.model_specs import SMALL_QWEN

MODEL = replace(SMALL_QWEN, vocab_size=1000, num_layers=4, moe_layers=(1, 2, 3), tie_embeddings=False)
PLAN = """\
model: {path: checkpoint}
cluster: {nodes: 1, ranks_per_node: 8, device: cuda, hardware: h100-sxm}
deployments:
  prefill:
    instances: 2
    expert_parallel: 2
    scheduler: {max_batch_tokens: 512, max_sequences: 16, chunk_tokens: 512}
    kv_cache: {block_tokens: 16, blocks: 512}
  decode:
    expert_parallel: 4
    redundant_experts: 4
    scheduler: {max_batch_tokens: 64, max_sequences: 64, chunk_tokens: 64}
    kv_cache: {block_tokens: 16, blocks: 512}
slo: {ttft_ms: 50, tpot_ms: 10}
"""
SKEWED = LoadChoice("power", 1.0)


def make_plan(folder, *overrides: str) -> EffectivePlan:
    return effective(folder, PLAN, *overrides, model=MODEL)


def placements(plan: EffectivePlan) -> dict[str, Placement]:
    return {
        d.name: linear(
            num_layers=MODEL.num_moe_layers,
            num_experts=MODEL.moe.num_experts,
            num_ranks=d.expert_parallel,
            redundant_experts=d.redundant_experts,
        )
        for d in plan.deployments
    }


def requests(count: int = 60, every: float = 0.05, together: int = 1) -> list[VirtualRequest]:
    """`together` of them arrive at a time."""
    return [
        VirtualRequest(
            index=i,
            at=every * (i // together),
            input_length=100 + 37 * i % 300,
            output_length=1 + 13 * i % 90,
            hash_ids=(i % 3, 100 + i) if i % 4 == 0 else (),
            block_tokens=256.0,
        )
        for i in range(count)
    ]


def prepared_of(folder, *overrides: str) -> Prepared:
    plan = make_plan(folder, *overrides)
    return prepare(plan, MODEL, placements(plan), Workload(250.0, 45.0), SKEWED)["decode"]


def shift(at: float, to: str, mix: float = 1.0, deployment: str = "decode") -> LoadShift:
    return LoadShift(deployment=deployment, at=at, to=to, mix=mix, where="events.yaml:2")


def assumed(drift: float = 0.0) -> Assumed:
    return Assumed(
        load_LE=np.array([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]),
        placement=linear(num_layers=2, num_experts=4, num_ranks=2),
        redundant_experts=0,
        moe_layers=(1, 2),
        top_k=2,
        ranks_per_node=2,
        drift=Drift(common=drift, sequence=0.0),
        tokens_per_sequence=1.0,
    )
