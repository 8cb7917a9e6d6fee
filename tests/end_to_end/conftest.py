"""Checkpoints, prompts and reference tokens, made once per session."""

from pathlib import Path

import numpy as np
import pytest

from moe_runtime.checkpoint.make import make_checkpoint
from tests.end_to_end.oracle import Reference, reference

FAMILIES = ("deepseek_v3", "qwen3_moe")
MAX_TOKENS = 64
VOCAB = 512


# With these seeds (nearly) no position is too close to call.
SEEDS = {"deepseek_v3": 3, "qwen3_moe": 0}


def prompts(family: str) -> list[list[int]]:
    """16 prompts of lengths 1..300."""
    rng = np.random.default_rng(SEEDS.get(family, 0))
    lengths = [1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 90, 128, 129, 200, 257, 300]
    return [rng.integers(8, VOCAB, n).tolist() for n in lengths]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make_checkpoint(root / family, family=family, size="tiny")
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def references(checkpoints) -> dict[str, list[Reference]]:
    return {family: reference(path, prompts(family), MAX_TOKENS) for family, path in checkpoints.items()}
