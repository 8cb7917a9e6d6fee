"""Rebalancing as users start it: loads that one run recorded place the experts of the next, which moves."""

import json
from itertools import chain

import numpy as np
import pytest

from moe_runtime.models.families.registry import read_spec
from tests.end_to_end.commands import left_running, moe, read_generated, write_plan
from tests.end_to_end.conftest import prompts

pytestmark = pytest.mark.multiproc
TOKENS = 24
FAMILY = "qwen3_moe"


def test_recorded_loads_start_a_run_that_rebalances(tmp_path, checkpoints):
    """Greedy tokens are those of one rank; the counts of prefill and decode ranks are what the tokens make.

    Both deployments balance, each with its own slots.
    """
    spec, asked = read_spec(checkpoints[FAMILY]), prompts(FAMILY)[:10]
    lines = [{"prompt_token_ids": ids, "max_tokens": TOKENS, "ignore_eos": True} for ids in asked]
    prompt_file = tmp_path / "prompts.jsonl"
    prompt_file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def generate(name: str, deployments: dict) -> list[list[int]]:
        plan = write_plan(tmp_path / f"{name}.yaml", checkpoints[FAMILY], deployments)
        out, load, logits = (tmp_path / f"{name}.{kind}" for kind in ("jsonl", "npz", "logits.npz"))
        files = {"--prompts": prompt_file, "--out": out, "--logits": logits, "--dump-expert-load": load}
        done = moe("generate", plan, *chain.from_iterable(files.items()))
        assert done.code == 0, done.err
        assert left_running(tmp_path) == []
        return read_generated(out, logits).tokens

    balancing = {"enabled": True, "initial": "still.npz", "interval_tokens": 32, "bytes_per_step": 1 << 14}
    role = {
        "expert_parallel": 2,
        "redundant_experts": 4,
        "kv_cache": {"prefix_cache": False},
        "balancing": balancing,
    }
    still = generate("still", {"unified": {"kv_cache": {"prefix_cache": False}}})
    moving = generate("moving", {"prefill": role, "decode": {**role, "redundant_experts": 8}})
    assert moving == still
    prompt_rows, output_rows = sum(map(len, asked)), (TOKENS - 1) * len(asked)
    for name, rows in (
        ("still", prompt_rows + output_rows),
        ("moving.prefill", prompt_rows),
        ("moving.decode", output_rows),
    ):
        with np.load(tmp_path / f"{name}.npz") as data:
            assert data["layers"].tolist() == list(spec.moe_layers)
            assert data["load"].sum(axis=1).tolist() == [rows * spec.moe.router.top_k] * spec.num_moe_layers
