"""A rank that falls in the middle of a step: the others say whom they wait for, and nothing stays behind."""

import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, Done, left_running, moe, write_plan, write_prompts
from tests.wall import at_most

pytestmark = pytest.mark.multiproc
DEADLINE = 3.0


def falling(tmp_path: Path, number: str, deadline: float) -> dict[str, str]:
    """An environment in which rank 2 sends itself a signal in a combine, and waits have this deadline."""
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject" / "sitecustomize.py").write_text(
        f"""
import os, signal, sys
rank = os.environ.get("MOE_RUNTIME_RANK")
if rank is not None and "moe_runtime" in " ".join(sys.orig_argv) and "MOE_RUNTIME_FRONTEND" not in os.environ:
    from moe_runtime.expert_parallel.collective import CollectiveBuffer
    from moe_runtime.expert_parallel.shm import ShmBuffer
    from moe_runtime.launch import worker
    from moe_runtime.engine.rank import RankEngine
    worker.STEP_TIMEOUT = {deadline}
    forward, steps = RankEngine._forward, []
    def counted(self, decision):
        steps.append(self.step_number)
        return forward(self, decision)
    RankEngine._forward = counted
    for kind in (ShmBuffer, CollectiveBuffer):
        def combine(self, y, rows, whole=kind.combine):
            if len(steps) == 4 and rank == "2":
                open({str(tmp_path / "fell")!r}, "w").close()
                os.kill(os.getpid(), signal.{number})
            return whole(self, y, rows)
        kind.combine = combine
"""
    )
    return {"PYTHONPATH": f"{tmp_path / 'inject'}:{ROOT}"}


def generate(
    tmp_path: Path, checkpoint: Path, deployments: dict, number: str, deadline: float
) -> tuple[Done, float]:
    """All four ranks have work. Returns what was said, and how long it took from the fall to the end."""
    plan = write_plan(tmp_path / "plan.yaml", checkpoint, deployments)
    asked = write_prompts(tmp_path / "prompts.jsonl", [[9] * 20] * 8, 16)
    arguments = ["generate", plan, "--prompts", asked, "--out", tmp_path / "out.jsonl"]
    done = moe(*arguments, env=falling(tmp_path, number, deadline), timeout=240)
    return done, time.time() - (tmp_path / "fell").stat().st_mtime


def check_survivors(done: Done, names: list[str], error: str) -> None:
    """Each says the same in one line, and nothing else is said of them."""
    for name in names:
        (line,) = [text for text in done.err.splitlines() if text.startswith(f"{name} ended: ")]
        assert line.startswith(f"{name} ended: {error}, layer "), line
        assert ", combine, step " in line
    assert "Traceback" not in done.err


def test_a_rank_stopped_in_a_combine_ends_the_launch_within_the_deadline(tmp_path, checkpoints):
    deployments = {"unified": {"expert_parallel": 4, "dispatch": {"backend": "shm"}}}
    done, seconds = generate(tmp_path, checkpoints["deepseek_v3"], deployments, "SIGSTOP", DEADLINE)
    assert done.code == 1
    check_survivors(done, ["rank 0", "rank 1", "rank 3"], "StepTimeout: waiting for rank 2")
    assert f"not there after {DEADLINE:.1f} s" in done.err
    # The deadline, a moment for all survivors to speak, and the grace that the stopped one cannot use: 9 s
    # where processes come and go quickly.
    assert seconds < DEADLINE + at_most(20)
    assert left_running(tmp_path) == []


def test_a_rank_killed_in_a_combine_ends_the_launch_at_once(tmp_path, checkpoints):
    """Errors count ranks within the instance, so with several a rank says which of them it is."""
    decode = {"expert_parallel": 3, "dispatch": {"backend": "torch"}}
    deployments = {"prefill": {"expert_parallel": 1}, "decode": decode}
    done, seconds = generate(tmp_path, checkpoints["deepseek_v3"], deployments, "SIGKILL", 100.0)
    assert done.code == 128 + 9
    survivors = ["rank 1 (decode-0 rank 0)", "rank 3 (decode-0 rank 2)"]
    check_survivors(done, survivors, "PeerLost: waiting for rank 1")
    assert "rank 2 was killed by SIGKILL" in done.err
    assert seconds < at_most(5)
    assert left_running(tmp_path) == []
