"""How launches end: idle, crashed, killed, interrupted, started wrongly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_runtime.report.files import load_report
from tests.end_to_end.commands import BIN, ROOT, left_running, moe, run, write_plan, write_prompts

pytestmark = pytest.mark.multiproc
TICK = os.sysconf("SC_CLK_TCK")


def unified(ep: int) -> dict:
    return {"unified": {"expert_parallel": ep}}


def trace(path: Path, *arrivals_ms: int, output: int = 4) -> Path:
    lines = [{"timestamp": t, "input_length": 20, "output_length": output} for t in arrivals_ms]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench_command(tmp_path: Path, checkpoint: Path, deployments: dict, trace_file: Path) -> list[str]:
    plan = write_plan(tmp_path / "plan.yaml", checkpoint, deployments)
    out = tmp_path / "run.json"
    command = [sys.executable, "-m", "moe_runtime", "bench", plan, "--trace", trace_file, "--out", out]
    return [str(part) for part in command]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(p) for p in text.split()]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def wait_for(condition, seconds: float, what: str):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)
    return result


class Launched:
    """A launch in the background, always reaped."""

    def __init__(self, command: list[str], marker: Path, env: dict[str, str] | None = None) -> None:
        self.marker = marker
        self.err = marker / "stderr"
        with self.err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not left_running(self.marker), 15, "end of all processes")

    def ranks(self, count: int) -> list[int]:
        """Pids of the ranks, in rank order, once all of them run."""

        def pids() -> list[int] | None:
            found = children(self.process.pid)
            return found if len(found) == count else None

        return wait_for(pids, 30, f"{count} ranks")

    def frontend(self, rank_0: int) -> int:
        """Pid of the frontend: it starts when all ranks are loaded."""
        return wait_for(lambda: children(rank_0), 90, "frontend")[0]


@pytest.fixture
def slow_trace(tmp_path) -> Path:
    """Work now, work in half a minute, nothing in between."""
    return trace(tmp_path / "trace.jsonl", 0, 30_000)


def test_an_idle_launch_parks_and_ends_when_a_rank_of_it_is_killed(tmp_path, checkpoints, slow_trace):
    deployments = {"prefill": {"expert_parallel": 2}, "decode": {"expert_parallel": 2}}
    command = bench_command(tmp_path, checkpoints["deepseek_v3"], deployments, slow_trace)
    with Launched(command, tmp_path) as launched:
        ranks = launched.ranks(4)
        launched.frontend(ranks[0])
        time.sleep(9)  # the first request is long done, and 5 s have passed
        before, began = [cpu_seconds(p) for p in ranks], time.monotonic()
        time.sleep(8)
        used = sum(cpu_seconds(p) - b for p, b in zip(ranks[:2], before[:2], strict=True))
        decode = sum(cpu_seconds(p) - b for p, b in zip(ranks[2:], before[2:], strict=True))
        seconds = time.monotonic() - began
        assert used / seconds < 0.01, f"prefill used {100 * used / seconds:.2f} % of a core"
        assert decode / seconds < 0.01, f"decode used {100 * decode / seconds:.2f} % of a core"
        os.kill(ranks[1], signal.SIGKILL)
        assert launched.process.wait(10) == 128 + signal.SIGKILL
        wait_for(lambda: not left_running(tmp_path), 5, "end of all processes")
    text = launched.err.read_text()
    assert "rank 1 was killed by SIGKILL" in text
    assert "Traceback" not in text
    assert not (tmp_path / "run.json").exists()


def test_a_killed_launcher_leaves_nothing_behind(tmp_path, checkpoints, slow_trace):
    command = bench_command(
        tmp_path, checkpoints["deepseek_v3"], {"unified": {"expert_parallel": 2}}, slow_trace
    )
    with Launched(command, tmp_path) as launched:
        ranks = launched.ranks(2)
        launched.frontend(ranks[0])
        launched.process.kill()
        launched.process.wait()
        wait_for(lambda: not left_running(tmp_path), 5, "end of all processes")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_stops_all(tmp_path, checkpoints, slow_trace, number):
    command = bench_command(
        tmp_path, checkpoints["deepseek_v3"], {"unified": {"expert_parallel": 2}}, slow_trace
    )
    with Launched(command, tmp_path) as launched:
        launched.ranks(2)
        time.sleep(1)
        launched.process.send_signal(number)
        assert launched.process.wait(15) == 128 + number
        wait_for(lambda: not left_running(tmp_path), 5, "end of all processes")
    assert "Traceback" not in launched.err.read_text()


@pytest.fixture
def failing_rank(tmp_path) -> dict[str, str]:
    """An environment in which rank 1 raises in its third step."""
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject" / "sitecustomize.py").write_text(
        """
import os, sys
rank = os.environ.get("MOE_RUNTIME_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if rank == "1" and "moe_runtime" in " ".join(sys.orig_argv) and "MOE_RUNTIME_FRONTEND" not in os.environ:
    import moe_runtime.scheduler.scheduler as module
    whole, calls = module.Scheduler.build, []
    def build(self, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise ArithmeticError("injected failure")
        return whole(self, *arguments)
    module.Scheduler.build = build
"""
    )
    return {"PYTHONPATH": f"{tmp_path / 'inject'}:{ROOT}"}


def test_a_failing_rank_is_heard_first(tmp_path, checkpoints, failing_rank):
    plan = write_plan(tmp_path / "plan.yaml", checkpoints["deepseek_v3"], unified(3))
    asked = write_prompts(tmp_path / "prompts.jsonl", [[9] * 20, [10] * 30, [11] * 5], 16)
    out = tmp_path / "out.jsonl"
    began = time.monotonic()
    done = moe("generate", plan, "--prompts", asked, "--out", out, env=failing_rank, timeout=60)
    assert done.code == 1
    assert time.monotonic() - began < 50
    assert done.err.lstrip().startswith("rank 1 failed:\nTraceback")
    assert "ArithmeticError: injected failure" in done.err
    assert done.err.count("Traceback") == 1
    assert list(tmp_path.glob("*out.jsonl*")) == []
    assert left_running(tmp_path) == []


MPIRUN = [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe"]


def test_a_failing_rank_ends_mpirun(tmp_path, checkpoints, failing_rank):
    plan = write_plan(tmp_path / "plan.yaml", checkpoints["deepseek_v3"], unified(2))
    asked = write_prompts(tmp_path / "prompts.jsonl", [[9] * 20, [10] * 30], 16)
    command = [*MPIRUN, "-n", 2, sys.executable, "-m", "moe_runtime", "generate", plan]
    done = run(*command, "--prompts", asked, "--out", tmp_path / "out.jsonl", env=failing_rank, timeout=50)
    assert done.code != 0
    assert "ArithmeticError: injected failure" in done.err
    wait_for(lambda: not left_running(tmp_path), 5, "end of all processes")


def test_a_world_of_the_wrong_size_is_refused(tmp_path, checkpoints):
    plan = write_plan(tmp_path / "plan.yaml", checkpoints["deepseek_v3"], unified(3))
    asked = write_prompts(tmp_path / "prompts.jsonl", [[9] * 20], 4)
    command = [*MPIRUN, "-n", 2, sys.executable, "-m", "moe_runtime", "generate", plan]
    done = run(*command, "--prompts", asked, "--out", tmp_path / "out.jsonl", timeout=50)
    assert done.code == 2
    assert "the launcher started 2 ranks, the deployments take 3" in done.err
    assert done.err.count("error: ") == 1
    wait_for(lambda: not left_running(tmp_path), 5, "end of all processes")


def test_bench_reports_what_was_asked(tmp_path, checkpoints):
    """The demo's shape, on the tiny model: the counts of the report are those of the trace."""
    deployments = {
        "prefill": {"expert_parallel": 2},
        "decode": {"expert_parallel": 2, "redundant_experts": 4, "dispatch": {"mode": "per_step"}},
    }
    asked = trace(tmp_path / "trace.jsonl", *range(0, 2000, 100), output=8)
    command = bench_command(tmp_path, checkpoints["qwen3_moe"], deployments, asked)
    done = run(*command)
    assert done.code == 0, done.err
    assert "Throughput per node" in done.out
    report = load_report(tmp_path / "run.json")
    assert report.requests.finished == 20
    by_name = {d.name: d for d in report.deployments}
    assert by_name["prefill"].expert_parallel == by_name["decode"].expert_parallel == 2
    assert by_name["prefill"].dispatch_modes == {"normal": by_name["prefill"].steps}
    assert by_name["decode"].dispatch_modes == {"low_latency": by_name["decode"].steps}
    assert all(d.exchange.dispatched_rows for d in report.deployments)
    assert report.whole_run.output_tokens == 20 * 8
    shown = moe("report", tmp_path / "run.json")
    assert shown.code == 0
    assert shown.out == done.out
