"""benchmarks/live_rebalance.py: loads as skewed as the file's, and figures that follow from the rows."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.script import load_script
from tests.spec.model_specs import SMALL_DEEPSEEK

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "live_rebalance.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/live_rebalance.py")


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    """Of 8 layers and 64 experts, the hottest 40 times the mean of the others."""
    rows = np.ones((8, 64))
    rows[:, 9] = 40.0
    np.savetxt(tmp_path / "loads.csv", rows, delimiter=",", header="shares")
    return tmp_path / "loads.csv"


def test_topics_shuffle_the_same_skew(benchmark, loads):
    shares_PLE = benchmark.folded(loads, SMALL_DEEPSEEK, 2)
    assert shares_PLE.shape == (2, 7, 32)
    assert np.allclose(shares_PLE.sum(axis=2), 1)
    assert np.allclose(shares_PLE.max(axis=2), 40 / 71)
    assert (shares_PLE[0].argmax(axis=1) != shares_PLE[1].argmax(axis=1)).any()


@pytest.mark.multiproc
def test_it_runs(loads):
    options = {
        "ranks": 2,
        "only": "pause",
        "steps": 8,
        "sequences": 4,
        "row-us": 1,
        "topics": 1,
        "loads": loads,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["check"].startswith("p99 ITL")
    assert sum(row["steps"]) == 3 * 8 - 4, "three topics, without the steps that warm up"
    assert row["with_ms"] > 0
