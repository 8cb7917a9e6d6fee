"""DeepEP in an effective plan: its modes' limits by name, and its registered buffers in the budget.

Plans with `deepep` need `cluster.device: cuda`, which `check` refuses for now; these plans are made by
replacing the backend of a resolved one.
"""

from dataclasses import replace

import pytest

from moe_runtime.errors import PlanError
from moe_runtime.plan.budget import memory_per_rank
from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.plan.validate import plan_warnings, validate
from moe_runtime.spec.bytes import low_latency_buffer_bytes, normal_buffer_bytes
from moe_runtime.spec.model import ModelSpec
from tests.plan.plans import SPLIT, effective
from tests.spec.model_specs import DEEPSEEK_V3

V3 = DEEPSEEK_V3


def deepep_plan(tmp_path, *overrides: str, model: ModelSpec = V3) -> EffectivePlan:
    plan = effective(
        tmp_path,
        SPLIT,
        "model.dtype=bfloat16",
        "cluster.nodes=22",
        "cluster.ranks_per_node=8",
        "deployments.prefill.expert_parallel=32",
        "deployments.prefill.redundant_experts=32",
        "deployments.decode.expert_parallel=144",
        "deployments.decode.redundant_experts=32",
        "deployments.decode.dispatch.max_tokens=128",
        *overrides,
        model=model,
    )
    return replace(
        plan,
        deployments=tuple(
            replace(d, dispatch=replace(d.dispatch, backend="deepep")) for d in plan.deployments
        ),
    )


def test_the_published_deployment_has_nothing_to_warn_of(tmp_path):
    assert plan_warnings(deepep_plan(tmp_path), V3) == ()


def test_buffers_are_the_published_formulas_over_physical_slots(tmp_path):
    plan = deepep_plan(tmp_path)
    prefill, decode = (memory_per_rank(plan, d, V3).dispatch for d in plan.deployments)
    assert prefill == sum(normal_buffer_bytes(hidden=7168, ranks=32))
    assert decode == low_latency_buffer_bytes(max_tokens=128, hidden=7168, slots=288)


def test_ep_320_is_warned_of(tmp_path):
    plan = deepep_plan(
        tmp_path,
        "cluster.nodes=44",
        "deployments.decode.expert_parallel=320",
        "deployments.decode.redundant_experts=64",
    )
    assert plan_warnings(plan, V3) == (
        "deployments.decode: backend deepep, untested: deepep_low_latency: ranks = 320 must be at most 256",
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("deployments.decode.dispatch.max_tokens=512", "deepep_low_latency: max_tokens = 512 must be"),
        ("deployments.decode.dispatch.max_tokens=511", ""),
        ("model.dtype=float32", "rows are float32, DeepEP carries bfloat16 or float8_e4m3"),
    ],
)
def test_hard_limits_are_named(tmp_path, override, words):
    plan = deepep_plan(tmp_path, override)
    with pytest.raises(PlanError) as caught:  # 22 nodes of GPUs do not fit this CPU host in any case
        validate(None, plan, V3)
    message = str(caught.value)
    assert "dispatch.backend" in message
    assert (words in message) if words else ("cannot carry" not in message)
