"""Batch-invariant mode: the same bits for a prompt alone, with 31 others, on other ranks, at any EP degree.

Tokens are drawn at temperature 1, where a difference in the last bits of the logits shows sooner or later.
"""

import json

import numpy as np
import pytest

from tests.end_to_end.commands import Generated, moe, read_generated, write_plan
from tests.end_to_end.conftest import prompts

pytestmark = pytest.mark.multiproc

TOKENS = 16
DEPLOYMENTS = {
    "ep_2_overlapped": {
        "unified": {
            "expert_parallel": 2,
            "scheduler": {"chunk_tokens": 50, "max_sequences": 16},
            "overlap": {"micro_batches": 2},
            "dispatch": {"max_tokens": 12},  # prompts in rounds
        }
    },
    "split_ep_4_replicas": {
        "prefill": {"expert_parallel": 1},
        "decode": {"expert_parallel": 4, "redundant_experts": 8, "scheduler": {"pipeline_depth": 1}},
    },
}


def generate(folder, checkpoint, deployments, asked) -> Generated:
    for deployment in deployments.values():
        deployment["deterministic"] = True
    folder.mkdir()
    plan = write_plan(folder / "plan.yaml", checkpoint, deployments)
    lines = [
        {"prompt_token_ids": ids, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": seed}
        for seed, ids in asked
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, logits = folder / "out.jsonl", folder / "logits.npz"
    done = moe("generate", plan, "--prompts", folder / "prompts.jsonl", "--out", out, "--logits", logits)
    assert done.code == 0, done.err
    return read_generated(out, logits)


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.soak)])
def test_a_prompt_gives_the_same_bits_in_any_company(tmp_path, checkpoints, family):
    asked = list(enumerate(prompts(family) * 2))
    alone = asked[13]
    one = generate(tmp_path / "alone", checkpoints[family], {"unified": {"expert_parallel": 1}}, [alone])
    runs = {
        name: generate(tmp_path / name, checkpoints[family], deployments, asked)
        for name, deployments in DEPLOYMENTS.items()
    }
    for run in runs.values():
        assert run.tokens[13] == one.tokens[0]
        assert np.array_equal(run.logits[13], one.logits[0])
    first, second = runs.values()
    assert first.tokens == second.tokens
    assert np.array_equal(first.logits, second.logits)
    assert len({tuple(t) for t in first.tokens}) == len(asked), "the samples differ, so bits would show"
