"""Plans for a model of the catalog: everything is checked, nothing of them runs."""

from pathlib import Path

import pytest

from moe_runtime.errors import PlanError
from moe_runtime.launch.preflight import preflight
from moe_runtime.plan.unavailable import unavailable_to_run
from moe_runtime.spec.bytes import replicated_weight_bytes, slot_bytes
from moe_runtime.spec.catalog import CATALOG, DEEPSEEK_V3
from moe_runtime.spec.deepep_bytes import low_latency_buffer_bytes
from tests.plan.plans import UNIFIED, effective, load, write

PLAN = """\
model: {path: catalog:deepseek-v3}
cluster: {nodes: 13, ranks_per_node: 8, device: cuda, hardware: h100-sxm}
deployments:
  prefill:
    expert_parallel: 32
    redundant_experts: 32
    scheduler: {max_batch_tokens: 8192, max_sequences: 32, chunk_tokens: 8192}
    kv_cache: {block_tokens: 64, blocks: 1024}
    dispatch: {backend: deepep, dtype: float8_e4m3}
  decode:
    expert_parallel: 72
    redundant_experts: 32
    scheduler: {max_batch_tokens: 128, max_sequences: 128, chunk_tokens: 128}
    kv_cache: {block_tokens: 64, blocks: 6144}
    dispatch: {backend: deepep, dtype: float8_e4m3}
"""


def test_memory_is_that_of_the_published_precision(tmp_path: Path):
    flight = preflight(write(tmp_path, PLAN), (), check_tensors=True, to_run=False)
    assert flight.model == DEEPSEEK_V3
    assert flight.effective.model.path == "catalog:deepseek-v3"
    assert flight.effective.model.dtype == "bfloat16"
    decode = flight.budgets[1]
    assert decode.shared_weights == replicated_weight_bytes(DEEPSEEK_V3, "bfloat16")
    assert decode.experts + decode.redundant_experts == 4 * slot_bytes(DEEPSEEK_V3, "bfloat16")
    assert decode.dispatch == low_latency_buffer_bytes(max_tokens=128, hidden=7168, slots=288)
    assert flight.placements["decode"].slots_per_rank == 4


def test_running_it_is_refused_and_says_what_to_set(tmp_path: Path):
    """On CPUs as on GPUs; the path comes before what else is missing."""
    path = write(tmp_path, PLAN)
    with pytest.raises(PlanError) as caught:
        preflight(path, (), check_tensors=False)
    assert caught.value.problems[0].key == "model.path"
    assert "--set model.path=DIR" in str(caught.value)
    small = effective(tmp_path, UNIFIED, "model.path='catalog:qwen3-30b'", model=CATALOG["qwen3-30b"])
    (problem,) = unavailable_to_run(small, lambda package: False)
    assert problem.path == ("model", "path")


def test_unknown_names_are_refused(tmp_path: Path):
    with pytest.raises(PlanError, match=r"not a model of the catalog.*did you mean catalog:kimi-k2\?"):
        load(tmp_path, UNIFIED, "model.path=catalog:kimi-k1")
    with pytest.raises(PlanError, match="known: deepseek-v3, deepseek-r1"):
        load(tmp_path, UNIFIED, "model.path='catalog:'")


def test_a_folder_of_such_a_name_can_still_be_meant(tmp_path: Path):
    plan = load(tmp_path, UNIFIED, "model.path=./catalog:kimi-k2").plan
    assert plan.model.path == str(tmp_path / "catalog:kimi-k2")
