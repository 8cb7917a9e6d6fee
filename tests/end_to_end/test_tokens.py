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
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_unified(tmp_path, checkpoints, references, family, ep):
    compare(references[family], generate(tmp_path, checkpoints, family, unified(ep)))


@pytest.mark.parametrize("family", FAMILIES)
def test_split_prefill_and_decode(tmp_path, checkpoints, references, family):
    compare(references[family], generate(tmp_path, checkpoints, family, SPLIT))


@pytest.mark.parametrize(
    "launcher",
    [
        [BIN / "torchrun", "--standalone", "--nproc-per-node", 6, "-m", "moe_runtime"],
        [
            BIN / "mpirun",
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            6,
            sys.executable,
            "-m",
            "moe_runtime",
        ],
    ],
    ids=["torchrun", "mpirun"],
)
def test_launchers(tmp_path, checkpoints, references, launcher):
    arguments, out, logits = files(tmp_path, checkpoints, "deepseek_v3", SPLIT)
    done = run(*launcher, *arguments)
    assert done.code == 0, done.err
    compare(references["deepseek_v3"], read_generated(out, logits))


TIGHT: dict[str, dict] = {"kv_cache": {"blocks": 30, "block_tokens": 16}}
RARE = ("chunk_256", "blocks_of_one")  # as others of these, with other sizes
VARIANTS = {
    "chunk_16": unified(scheduler={"chunk_tokens": 16}),
    "chunk_256": unified(scheduler={"chunk_tokens": 256}),
    "one_at_a_time": unified(scheduler={"max_sequences": 1}),
    "depth_1": unified(scheduler={"pipeline_depth": 1}),
    "depth_0_ep_2_rounds": unified(2, scheduler={"pipeline_depth": 0}, dispatch={"max_tokens": 24}),
    "depth_1_ep_2_tight": unified(2, scheduler={"pipeline_depth": 1, "chunk_tokens": 40}, **TIGHT),
    "preemption": unified(1, **TIGHT),
    "blocks_of_one": unified(kv_cache={"blocks": 4000, "block_tokens": 1}),
    "split_tight_depth_1": {
        "prefill": {"scheduler": {"pipeline_depth": 1}, **TIGHT},
        "decode": {"expert_parallel": 2, "scheduler": {"pipeline_depth": 1}, **TIGHT},
    },
}


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.soak) if v in RARE else v for v in VARIANTS]
)
def test_scheduling_changes_no_token(tmp_path, checkpoints, references, variant):
    compare(references["deepseek_v3"], generate(tmp_path, checkpoints, "deepseek_v3", VARIANTS[variant]))


def test_thirty_two_at_once(tmp_path, checkpoints, references):
    """Every prompt twice: both copies give the reference's tokens."""
    arguments, out, logits = files(tmp_path, checkpoints, "deepseek_v3", unified(2))
    write_prompts(tmp_path / "prompts.jsonl", prompts("deepseek_v3") * 2, MAX_TOKENS)
    done = moe(*arguments, "--set", "deployments.unified.scheduler.max_sequences=32")
    assert done.code == 0, done.err
    compare(references["deepseek_v3"] * 2, read_generated(out, logits))


@pytest.mark.parametrize("deployments", ["unified", "split"])
def test_two_micro_batches_change_no_token(tmp_path, checkpoints, references, deployments):
    asked = {"overlap": {"micro_batches": 2}}
    plans = {
        "unified": unified(3, scheduler={"chunk_tokens": 50}, dispatch={"max_tokens": 16}, **asked),
        "split": {"prefill": {"expert_parallel": 2, **asked}, "decode": {"expert_parallel": 2, **asked}},
    }
    generated = generate(tmp_path, checkpoints, "deepseek_v3", plans[deployments])
    compare(references["deepseek_v3"], generated)


def test_an_instance_over_two_nodes(tmp_path, checkpoints, references):
    """Ranks of different nodes agree through the tree of leaders; on one host, that is loopback."""
    arguments, out, logits = files(tmp_path, checkpoints, "deepseek_v3", unified(4))
    done = moe(*arguments, "--set", "cluster.nodes=2")
    assert done.code == 0, done.err
    compare(references["deepseek_v3"], read_generated(out, logits))


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


def test_qwen_under_preemption_at_depth_1(tmp_path, checkpoints, references):
    deployments = unified(1, scheduler={"pipeline_depth": 1}, **TIGHT)
    compare(references["qwen3_moe"], generate(tmp_path, checkpoints, "qwen3_moe", deployments))
