"""The GPU benchmark of kernels at small sizes on a CPU: its checks hold and its lines are complete."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_tiny_run():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.kernels", "--tiny"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    first, *rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["modules"]["route"] == "route.cpu"
    checks = [row for row in rows if "check" in row]
    assert {row["check"] for row in checks} >= {"route", "permute", "grouped_gemm", "mla_decode", "rope"}
    assert all(row["ok"] for row in checks)
    timed = [row for row in rows if "seconds" in row]
    assert len(timed) + len(checks) == len(rows)
    assert {row["operation"] for row in timed} >= {"route", "permute", "grouped_gemm", "mla_decode"}
    assert all(row["seconds"] > 0 and row["floor_seconds"] > 0 for row in timed)
    assert all("met" in row for row in timed if "target" in row)
