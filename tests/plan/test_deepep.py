"""DeepEP in a plan for GPUs, checked on a machine without: modes, rows, limits by name, buffers."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.errors import PlanError
from moe_runtime.plan.budget import memory_per_rank
from moe_runtime.plan.load import LoadedPlan
from moe_runtime.plan.problems import dotted
from moe_runtime.plan.show import check_json, render_check
from moe_runtime.plan.unavailable import unavailable_to_run
from moe_runtime.plan.validate import plan_warnings
from moe_runtime.spec.deepep_bytes import low_latency_buffer_bytes, normal_buffer_bytes
from tests.plan.plans import checked
from tests.spec.model_specs import DEEPSEEK_V3

# The published deployment: prefill EP 32, decode EP 144, 32 redundant experts each. The weights are held
# in bf16 here, which takes GPUs of 288 GB.
PUBLISHED = """\
model: {path: checkpoint, dtype: bfloat16}
cluster: {nodes: 22, ranks_per_node: 8, device: cuda, hardware: mi355x}
deployments:
  prefill:
    expert_parallel: 32
    redundant_experts: 32
    dispatch: {backend: deepep, dtype: float8_e4m3}
  decode:
    expert_parallel: 144
    redundant_experts: 32
    dispatch: {backend: deepep}
    scheduler: {max_sequences: 128}
"""
UNIFIED = """\
model: {path: checkpoint, dtype: bfloat16}
cluster: {nodes: 4, ranks_per_node: 8, device: cuda, hardware: mi355x}
deployments:
  unified: {expert_parallel: 32, redundant_experts: 32, dispatch: {backend: deepep}}
"""
D = "deployments.decode"
V3 = DEEPSEEK_V3
MIB = 2**20


def check(folder: Path, text: str, *overrides: str):
    return checked(folder, text, *overrides, model=V3, host_memory_bytes=None)


def rendered(loaded: LoadedPlan, plan, budgets) -> str:
    obstacles = tuple(unavailable_to_run(plan, lambda _: False))
    return " ".join(render_check(plan, loaded, V3, budgets, obstacles).split())


def test_a_plan_for_gpus_is_checked_in_full_and_says_why_it_does_not_run_here(tmp_path):
    loaded, plan, budgets = check(tmp_path, PUBLISHED)
    text = rendered(loaded, plan, budgets)
    low_latency = low_latency_buffer_bytes(max_tokens=128, hidden=7168, slots=288)
    normal = sum(normal_buffer_bytes(hidden=7168, ranks=32))
    assert (
        f"prefill: DeepEP registers per rank, for 288 physical experts: normal {normal / MIB:,.2f} MiB"
        in text
    )
    assert f"low_latency {low_latency / MIB:,.2f} MiB" in text
    assert "dispatch.mode low_latency derived: DeepEP's for decode (auto: default)" in text
    assert "dispatch.mode normal derived: DeepEP's for prefill (auto: default)" in text
    assert "does not run here: cluster.device: running on GPUs is not available in this version" in text
    assert "deployments.decode.dispatch.backend: needs deep_ep, which is not installed" in text
    assert "pip install 'moe-runtime[deepep]'" in text
    assert "warning:" not in text


def test_buffers_are_the_published_formulas_over_physical_slots(tmp_path):
    _, plan, _ = check(tmp_path, PUBLISHED)
    prefill, decode = (memory_per_rank(plan, d, V3).dispatch for d in plan.deployments)
    assert prefill == sum(normal_buffer_bytes(hidden=7168, ranks=32))
    assert decode == low_latency_buffer_bytes(max_tokens=128, hidden=7168, slots=288)
    _, plan, _ = check(tmp_path, PUBLISHED, f"{D}.shared_experts=slots", f"{D}.redundant_experts=31")
    assert memory_per_rank(plan, plan.deployments[1], V3).dispatch == decode


def test_a_unified_deployment_has_both_modes_and_the_buffers_of_both(tmp_path):
    loaded, plan, budgets = check(tmp_path, UNIFIED)
    dispatch = plan.deployment("unified").dispatch
    assert (dispatch.mode, dispatch.modes, dispatch.max_tokens) == (
        "per_step",
        ("normal", "low_latency"),
        255,
    )
    low_latency = low_latency_buffer_bytes(max_tokens=255, hidden=7168, slots=288)
    assert budgets[0].dispatch == low_latency + sum(normal_buffer_bytes(hidden=7168, ranks=32))
    text = rendered(loaded, plan, budgets)
    assert "if all ranks only decode and one round of 255 rows per rank carries it" in text
    assert "max_batch_tokens, at most 255 in low-latency mode (auto: default)" in text


def test_the_mode_of_a_role_may_be_given(tmp_path):
    _, plan, _ = check(tmp_path, UNIFIED, "deployments.unified.dispatch.mode=normal")
    dispatch = plan.deployment("unified").dispatch
    assert (dispatch.modes, dispatch.max_tokens) == (("normal",), 512)


def test_ep_320_is_warned_of(tmp_path):
    sets = ("cluster.nodes=44", f"{D}.expert_parallel=320", f"{D}.redundant_experts=64")
    loaded, plan, budgets = check(tmp_path, PUBLISHED, *sets)
    assert plan_warnings(plan, V3) == (
        "deployments.decode: backend deepep, untested: deepep_low_latency: ranks = 320 must be at most 256",
    )
    assert check_json(plan, loaded, V3, budgets)["warnings"] == list(plan_warnings(plan, V3))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{D}.dispatch.max_tokens=512",), "deepep_low_latency: max_tokens = 512 must be at most 511"),
        (("model.dtype=float32",), "rows are float32, DeepEP carries bfloat16"),
        (
            ("cluster.nodes=44", f"{D}.expert_parallel=320", f"{D}.redundant_experts=64",
             f"{D}.dispatch.mode=normal"),
            "deepep_normal: ranks = 320 must be one of 2, 4, 8",
        ),
        (("cluster.device=cpu", "cluster.hardware=cpu-host"), "needs cluster.device: cuda"),
        ((f"{D}.dispatch.backend=shm",), "needs cluster.device: cpu"),
    ],
)  # fmt: skip
def test_hard_limits_are_named(tmp_path, overrides, words):
    with pytest.raises(PlanError) as caught:
        check(tmp_path, PUBLISHED, *overrides)
    problems = {p.key: str(p) for p in caught.value.problems}
    assert words in problems[f"{D}.dispatch.backend"]


def test_the_package_is_asked_for_only_where_it_is_used(tmp_path):
    _, plan, _ = check(tmp_path, UNIFIED)
    asked = [dotted(p.path) for p in unavailable_to_run(plan, lambda name: name == "deep_ep")]
    assert asked == ["cluster.device"]
    on_torch = replace(
        plan,
        deployments=tuple(
            replace(d, dispatch=replace(d.dispatch, backend="torch")) for d in plan.deployments
        ),
    )
    assert [dotted(p.path) for p in unavailable_to_run(on_torch, lambda _: False)] == ["cluster.device"]
