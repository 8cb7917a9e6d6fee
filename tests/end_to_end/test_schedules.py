"""Greedy tokens and logits of one rank equal transformers' own, however it schedules.

The ranks are threads of the test. It runs with the process tests, whose reference tokens it shares.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_runtime.frontend.live import Live
from moe_runtime.spec.requests import FinishReason, SamplingParams
from tests.end_to_end.commands import Generated
from tests.end_to_end.conftest import MAX_TOKENS, prompts
from tests.end_to_end.test_tokens import TIGHT, compare
from tests.engine.in_process import InProcess, ranks, running

pytestmark = pytest.mark.multiproc
DEPTH_1 = {"scheduler": {"pipeline_depth": 1}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3", {"unified": {}}),
    "qwen": ("qwen3_moe", {"unified": {}}),
    "small_chunks_at_depth_1": (
        "deepseek_v3",
        {"unified": {"scheduler": {"chunk_tokens": 16, "pipeline_depth": 1}}},
    ),
    "one_at_a_time": ("deepseek_v3", {"unified": {"scheduler": {"max_sequences": 1, "chunk_tokens": 256}}}),
    "preemption": ("deepseek_v3", {"unified": TIGHT}),
    "preemption_at_depth_1": ("qwen3_moe", {"unified": {**DEPTH_1, **TIGHT}}),
    "blocks_of_one": ("deepseek_v3", {"unified": {"kv_cache": {"blocks": 4000, "block_tokens": 1}}}),
    "split_preemption_at_depth_1": (
        "deepseek_v3",
        {"prefill": {**DEPTH_1, **TIGHT}, "decode": {**DEPTH_1, **TIGHT}},
    ),
}


async def answers(engines, bootstrap, asked: list[list[int]]) -> tuple[list[Live], int]:
    """Every prompt's answer, and how often a sequence was preempted."""
    async with running(engines, bootstrap) as launch:
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, want_logits=True)
        lives = [launch.fleet.submit(prompt, params) for prompt in asked]
        await asyncio.gather(*(live.done.wait() for live in lives))
        await launch.until(launch.at_baseline, 10, "everything back")
        return lives, sum(s.totals.preemptions for s in launch.statuses.values())


def logits_of(live: Live) -> np.ndarray:
    assert live.logits is not None
    return np.frombuffer(live.logits, np.float32)


@pytest.mark.parametrize("name", VARIANTS)
def test_scheduling_changes_no_token(tmp_path: Path, checkpoints, references, name):
    family, deployments = VARIANTS[name]
    with ranks(tmp_path, checkpoints[family], deployments) as (engines, bootstrap):
        lives, preemptions = asyncio.run(answers(engines, bootstrap, prompts(family)))
    assert all(live.finish_reason == FinishReason.LENGTH for live in lives)
    logits = np.stack([logits_of(live) for live in lives])
    compare(references[family], Generated([live.token_ids for live in lives], logits))
    assert bool(preemptions) == ("preemption" in name)


async def gaps(engines, bootstrap) -> list[float]:
    """Seconds from the first to the second token of requests with pauses between them."""

    async def one(launch: InProcess, number: int) -> float:
        live = launch.submit([9 + number] * 20, 3)
        await live.done.wait()
        first, second, _ = live.token_times
        await asyncio.sleep(1.2)
        return second - first

    async with running(engines, bootstrap) as launch:
        return [await one(launch, number) for number in range(4)]


def test_kv_reaches_an_idle_decode_instance_at_once(tmp_path, checkpoints):
    """Between requests the decode instance is parked; the second token must not wait for a heartbeat."""
    with ranks(tmp_path, checkpoints["deepseek_v3"], {"prefill": {}, "decode": {}}) as (engines, bootstrap):
        found = sorted(asyncio.run(gaps(engines, bootstrap)))
    assert found[1] < 0.5, found
