"""Greedy tokens and logits equal transformers' own, whatever the deployment looks like."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end.commands import BIN, Generated, moe, read_generated, run, write_plan, write_prompts
from tests.end_to_end.conftest import FAMILIES, MAX_TOKENS, prompts
from tests.end_to_end.oracle import Reference, reference

pytestmark = pytest.mark.multiproc

SPLIT = {
    "prefill": {"expert_parallel": 2},
    "decode": {"expert_parallel": 4, "redundant_experts": 8},
}


TIGHT: dict[str, dict] = {"kv_cache": {"blocks": 30, "block_tokens": 16}}


def unified(ep: int = 1, **sections: object) -> dict:
    return {"unified": {"expert_parallel": ep, **sections}}


def files(
    tmp_path: Path, checkpoints: dict[str, Path], family: str, deployments: dict
) -> tuple[list, Path, Path]:
    """Arguments of `generate`, and the two files it writes."""
    plan = write_plan(tmp_path / "plan.yaml", checkpoints[family], deployments)
    asked = write_prompts(tmp_path / "prompts.jsonl", prompts(family), MAX_TOKENS)
    out, logits = tmp_path / "out.jsonl", tmp_path / "logits.npz"
    return ["generate", plan, "--prompts", asked, "--out", out, "--logits", logits], out, logits


def generate(tmp_path: Path, checkpoints: dict[str, Path], family: str, deployments: dict) -> Generated:
    arguments, out, logits = files(tmp_path, checkpoints, family, deployments)
    # Freed KV is overwritten, so that a read of it would show.
    done = moe(*arguments, env={"MOE_RUNTIME_POISON_KV": "1"})
    assert done.code == 0, done.err
    return read_generated(out, logits)


def compare(references: list[Reference], generated: Generated) -> None:
    """All safe tokens equal; nearly all tokens are safe; logits within 2e-4."""
    for one, tokens in zip(references, generated.tokens, strict=True):
        assert len(tokens) == MAX_TOKENS
        assert tokens[: one.safe] == one.tokens[: one.safe], f"{len(one.prompt)} tokens in"
    compared = sum(r.safe for r in references)
    assert compared >= 0.9 * MAX_TOKENS * len(references), f"only {compared} positions are safe to compare"
    expected = torch.stack([r.logits for r in references if r.safe]).numpy()
    got = generated.logits[[bool(r.safe) for r in references]]
    assert np.abs(got - expected).max() <= 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks(tmp_path, checkpoints, references, family):
    """32 at once: every prompt twice; both copies give the reference's tokens."""
    arguments, out, logits = files(tmp_path, checkpoints, family, unified(2))
    write_prompts(tmp_path / "prompts.jsonl", prompts(family) * 2, MAX_TOKENS)
    done = moe(*arguments, "--set", "deployments.unified.scheduler.max_sequences=32")
    assert done.code == 0, done.err
    compare(references[family] * 2, read_generated(out, logits))


@pytest.mark.parametrize(("family", "nodes"), [("deepseek_v3", 2), ("qwen3_moe", 1)])
def test_four_ranks(tmp_path, checkpoints, references, family, nodes):
    """Ranks of different nodes agree through the tree of leaders; on one host, that is loopback."""
    arguments, out, logits = files(tmp_path, checkpoints, family, unified(4))
    done = moe(*arguments, "--set", f"cluster.nodes={nodes}")
    assert done.code == 0, done.err
    compare(references[family], read_generated(out, logits))


def test_split_prefill_and_decode(tmp_path, checkpoints, references):
    compare(references["deepseek_v3"], generate(tmp_path, checkpoints, "deepseek_v3", SPLIT))


MPIRUN = [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n"]


@pytest.mark.parametrize(
    ("launcher", "decode_ranks", "family"),
    [
        ([BIN / "torchrun", "--standalone", "--nproc-per-node", 6], 4, "qwen3_moe"),
        ([*MPIRUN, 4, sys.executable], 2, "deepseek_v3"),
    ],
    ids=["torchrun", "mpirun"],
)
def test_launchers(tmp_path, checkpoints, references, launcher, decode_ranks, family):
    deployments = {**SPLIT, "decode": {**SPLIT["decode"], "expert_parallel": decode_ranks}}
    arguments, out, logits = files(tmp_path, checkpoints, family, deployments)
    done = run(*launcher, "-m", "moe_runtime", *arguments)
    assert done.code == 0, done.err
    compare(references[family], read_generated(out, logits))


def test_rounds_and_preemption_at_depth_1(tmp_path, checkpoints, references):
    """Everything that scheduling does on one rank is in test_schedules."""
    deployments = unified(
        2, scheduler={"pipeline_depth": 1, "chunk_tokens": 40}, dispatch={"max_tokens": 24}, **TIGHT
    )
    compare(references["deepseek_v3"], generate(tmp_path, checkpoints, "deepseek_v3", deployments))


def test_two_micro_batches_change_no_token(tmp_path, checkpoints, references):
    """Prefill and decode apart; on ranks that do both, see `unified_per_step`."""
    role = {"expert_parallel": 2, "overlap": {"micro_batches": 2}}
    deployments = {"prefill": role, "decode": role}
    compare(references["deepseek_v3"], generate(tmp_path, checkpoints, "deepseek_v3", deployments))


MODES = {
    "unified_per_step": unified(
        3,
        redundant_experts=5,
        shared_experts="slots",
        scheduler={"chunk_tokens": 50},
        dispatch={"max_tokens": 16, "mode": "per_step"},
        overlap={"micro_batches": 2},
    ),
    "split_low_latency": {
        "prefill": {
            "expert_parallel": 2,
            "redundant_experts": 1,
            "shared_experts": "slots",
            "dispatch": {"backend": "torch", "mode": "low_latency"},
        },
        "decode": {
            "expert_parallel": 4,
            "redundant_experts": 3,
            "dispatch": {"mode": "low_latency", "max_tokens": 8},
        },
    },
}


@pytest.mark.parametrize("deployments", MODES)
def test_dispatch_modes_and_shared_slots_change_no_token(tmp_path, checkpoints, references, deployments):
    generated = generate(tmp_path, checkpoints, "deepseek_v3", MODES[deployments])
    compare(references["deepseek_v3"], generated)


def test_a_model_without_experts(tmp_path, checkpoints):
    """Data-parallel attention alone: no rank waits for another in the layers, and all requests end."""
    folder = tmp_path / "dense"
    config = AutoConfig.from_pretrained(checkpoints["deepseek_v3"])
    config.first_k_dense_replace = config.num_hidden_layers
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoints["deepseek_v3"] / name, folder)
    asked = prompts("deepseek_v3")[:7]
    arguments, out, logits = files(tmp_path, {"dense": folder}, "dense", unified(2))
    write_prompts(tmp_path / "prompts.jsonl", asked, MAX_TOKENS)
    done = moe(*arguments)
    assert done.code == 0, done.err
    compare(reference(folder, asked, MAX_TOKENS), read_generated(out, logits))
