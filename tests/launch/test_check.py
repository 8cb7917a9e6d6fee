"""`check` of a plan for GPUs on a machine without: all is shown, and only running it is refused."""

import argparse
import json
from pathlib import Path

import pytest

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.errors import PlanError
from moe_runtime.launch.commands import bench, check
from moe_runtime.launch.preflight import preflight
from moe_runtime.spec.deepep_bytes import normal_buffer_bytes

PLAN = """\
model: {path: checkpoint}
cluster: {nodes: 2, ranks_per_node: 8, device: cuda, hardware: h100-sxm}
deployments:
  unified: {expert_parallel: 16, redundant_experts: 16, dispatch: {backend: deepep, mode: normal}}
"""


@pytest.fixture
def plan(tmp_path) -> Path:
    make_checkpoint(tmp_path / "checkpoint", family="deepseek_v3", size="tiny", dtype="bfloat16")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path / "plan.yaml"


def checked(plan: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool) -> str:
    arguments = argparse.Namespace(plan=plan, overrides=[], json=as_json)
    assert check.run(arguments, []) == 0
    return capsys.readouterr().out


def test_everything_is_shown(plan, capsys):
    text = " ".join(checked(plan, capsys, as_json=False).split())
    num_bytes = sum(normal_buffer_bytes(hidden=32, ranks=16))
    assert f"for 48 physical experts: normal {num_bytes / 2**20:,.2f} MiB" in text
    assert "does not run here: cluster.device: running on GPUs is not available" in text
    data = json.loads(checked(plan, capsys, as_json=True))
    assert data["memory_per_rank"]["unified"]["dispatch"] == num_bytes
    assert any("pip install 'moe-runtime[deepep]'" in line for line in data["obstacles"])


def test_running_it_is_refused_by_name(plan):
    with pytest.raises(PlanError) as caught:
        preflight(plan, (), check_tensors=False)
    keys = [p.key for p in caught.value.problems]
    assert keys == ["cluster.device", "deployments.unified.dispatch.backend"]
    assert "(plan.yaml:2)" in str(caught.value)
    assert "needs deep_ep, which is not installed" in str(caught.value)


def test_what_was_never_tested_is_stamped_in_the_report(plan, tmp_path):
    """Nine ranks are a warning of `check`, and stand among the notes of a run's report."""
    plan.write_text("model: {path: checkpoint}\ndeployments:\n  unified: {expert_parallel: 9}\n")
    flight = preflight(plan, (), check_tensors=False)
    arguments = argparse.Namespace(
        out=tmp_path / "run.json",
        trace=tmp_path / "t.jsonl",
        speed=1.0,
        limit=None,
        scale_lengths=1.0,
        dump_expert_load=None,
    )
    facts = bench._Bench(arguments)._facts(flight, warmup_end=0.0)
    assert facts.notes == (
        "deployments.unified: backend shm, untested: ranks = 9 must be at most 8 (what the test suite runs)",
    )
