"""benchmarks/agreement.py and benchmarks/overlap.py run by one command and print what they promise.

How fast it was is not looked at here: other processes run beside tests.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.script import load_script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """A benchmark as a module."""
    return load_script(f"benchmarks/{name}.py")


@pytest.mark.multiproc
def test_agreement_of_three_nodes():
    arguments = ["--nodes", "3", "--ranks", "2", "--steps", "30", "--pause-ms", "1"]
    command = [sys.executable, str(BENCHMARKS / "agreement.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["nodes"], row["ranks"], row["hops"]) == (3, 6, 2)
    for name in ("first_to_last", "after_last_start", "hops_alone", "hop", "wake_up"):
        found = row[name]
        assert 0 < found["p50_us"] <= found["p90_us"] <= found["p99_us"] <= found["max_us"] < 10e6
    assert row["after_last_start"]["p50_us"] <= row["first_to_last"]["p50_us"]
    beyond = row["after_last_start"]["p99_us"] - row["hops_alone"]["p99_us"]
    assert row["p99_beyond_hops_us"] == pytest.approx(beyond, abs=0.2)


def test_overlap_over_a_slow_link(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "overlap.png"
    arguments = f"--size tiny --sequences 4 --length 16 --repetitions 1 --plot {picture}".split()
    monkeypatch.setattr(sys, "argv", ["overlap.py", *arguments])
    load("overlap").main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["factor"] for r in rows] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0]
    for row in rows:
        assert row["over_bound"] == pytest.approx(row["overlap_ms"] / row["bound_ms"], rel=0.02)
        # Nothing hides more than all of the link's time.
        assert row["plain_ms"] > 0.9 * row["factor"] * row["compute_split_ms"]
        assert row["bound_ms"] >= row["factor"] * row["compute_split_ms"]
    assert picture.read_bytes().startswith(b"\x89PNG")
