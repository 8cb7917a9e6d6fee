"""benchmarks/gpu/overlap: without a GPU it says so; what it compares is right on the CPU."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from tests.script import load_script

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/gpu/overlap.py")


def test_without_a_gpu_it_says_so():
    subprocess.run(["bash", "-n", FOLDER / "overlap.sh"], check=True, timeout=10)
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [FOLDER / "overlap.sh"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "overlap: needs a CUDA GPU, and torch sees none\n"


@torch.inference_mode()
def test_the_step_can_run_again_and_in_halves(benchmark, tmp_path):
    make_checkpoint(tmp_path / "tiny", family="deepseek_v3", size="tiny")
    cpu = torch.device("cpu")
    step = benchmark.Step(benchmark.load(tmp_path / "tiny", cpu), 6, cpu)
    whole, halves = step.contexts(1), step.contexts(2)
    assert [c.num_decode for c in whole + halves] == [6, 3, 3]
    first = step.forward(whole)
    assert torch.equal(step.forward(whole), first)
    assert benchmark.different(step.decoder, first, step.forward(halves), 1e-5) == []
    # It would notice: other hidden states, other tokens.
    wrong = benchmark.different(step.decoder, first, first.flip(0), 0.02)
    assert len(wrong) == 1
    assert wrong[0].startswith("hidden states differ by")
