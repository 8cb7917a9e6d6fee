"""Which kernels a plan gets, and what a report calls them."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from moe_runtime.errors import UserError
from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.experts import reference as experts
from moe_runtime.kernels.mla_decode import cpu as mla_decode
from moe_runtime.kernels.paged import reference as paged
from moe_runtime.launch.kernels import kernels_in_use, kernels_of
from moe_runtime.launch.weights import WeightReader
from moe_runtime.placement.placement import linear
from moe_runtime.report.show import kernels_as_text
from tests.plan.plans import UNIFIED, effective
from tests.spec.model_specs import SMALL_DEEPSEEK, SMALL_QWEN

AT = "deployments.unified"


def unified(tmp_path: Path, *overrides: str, model=SMALL_DEEPSEEK):
    return effective(tmp_path, UNIFIED, *overrides, model=model).deployment("unified")


def test_what_a_plan_forces_is_selected_and_nothing_else(tmp_path):
    kernels = kernels_of(unified(tmp_path, f"{AT}.kernels.experts=reference"))
    assert kernels.select("experts", "cpu") is experts.experts
    assert kernels.select("mla_decode", "cpu") is mla_decode.mla_decode
    forced = kernels_of(unified(tmp_path, f"{AT}.kernels.mla_decode=reference"))
    assert forced.select("plan_decode", "cpu") is paged.plan_decode, "a kernel goes with its own plan"


def test_a_report_names_what_ran(tmp_path):
    modules = kernels_in_use(unified(tmp_path, f"{AT}.kernels.experts=reference"), SMALL_DEEPSEEK, "cpu")
    assert modules["experts"] == "experts.reference"
    assert modules["mla_decode"] == "mla_decode.cpu"
    assert not [op for op in modules if op.startswith("gqa")]
    assert kernels_as_text(modules) == "cpu, experts reference, kv_write reference"
    qwen = kernels_in_use(unified(tmp_path, model=SMALL_QWEN), SMALL_QWEN, "cuda")
    assert qwen["gqa_decode"] == "gqa_decode.triton"
    same = kernels_in_use(unified(tmp_path, f"{AT}.deterministic=true"), SMALL_DEEPSEEK, "cpu")
    assert same["linear"] == "linear.cpu_invariant"


def test_kernels_that_cannot_run_are_the_users_to_mend(monkeypatch):
    def build():
        raise KernelError("no kernels for NVIDIA T4")

    monkeypatch.setattr("moe_runtime.launch.weights.Checkpoint.open", nullcontext)
    reader = WeightReader(build=build, targets=(), skipped=lambda name: False, rank=0)
    placement = linear(num_layers=1, num_experts=1, num_ranks=1, redundant_experts=0)
    with pytest.raises(UserError, match="cannot run here: no kernels for NVIDIA T4"):
        reader.read(Path(), placement)
