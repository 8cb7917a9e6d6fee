"""Rebalances of every kind, one after the other, change no token, and slots always hold what the map says."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from tests.end_to_end.commands import write_plan
from tests.engine.balancing.live import Forced, checksums, prompts
from tests.engine.instance import never_park, run_requests, start
from tests.expert_parallel.world import Rank, run_world

pytestmark = pytest.mark.multiproc
TOKENS = 64


def make_plan(folder: Path, family: str, ranks: int, **more: object) -> Path:
    make_checkpoint(folder / family, family=family, size="tiny")
    unified = {
        "expert_parallel": ranks,
        "redundant_experts": 4,
        "scheduler": {"max_batch_tokens": 64, "chunk_tokens": 12, "max_sequences": 8},
        "kv_cache": {"blocks": 128, "prefix_cache": False},
        "balancing": {"enabled": True, "interval_tokens": 1 << 40},
        **more,
    }
    return write_plan(folder / "plan.yaml", folder / family, {"unified": unified})


class Result(NamedTuple):
    still: dict[int, list]
    moving: list[dict[int, list]]
    begun: int
    epochs: int
    steps: int
    wrong: list[str]
    aborted: int


@torch.inference_mode()
def generate(rank: Rank, plan: Path, count: int) -> Result:
    """This rank's prompts with experts at rest, then with experts moving: whole steps, and split ones."""
    driven = start(rank, plan)
    never_park(driven)
    driven.engine.warm_up()
    forced = Forced(driven, checksums(driven))
    forced.install()
    requests = [(p, TOKENS) for p in prompts(rank.rank, count, range(8, 500))]
    still = run_requests(driven, requests).tokens
    forced.on, first = True, driven.engine.step_number
    moving = [run_requests(driven, requests, micro_batches=n).tokens for n in (1, 2)]
    balancing = driven.engine.balancing
    assert balancing is not None
    result = Result(
        still,
        moving,
        forced.begun,
        balancing.epoch,
        driven.engine.step_number - first,
        forced.wrong,
        balancing.mover.aborted,
    )
    driven.close()
    return result


@pytest.mark.parametrize(
    ("family", "ranks", "more"),
    [
        ("deepseek_v3", 4, {}),
        ("qwen3_moe", 2, {"deterministic": True}),
        ("deepseek_v3", 2, {"shared_experts": "slots", "dispatch": {"mode": "low_latency"}}),
    ],
    ids=["4 ranks", "2 ranks, deterministic", "2 ranks, shared experts in slots, low latency"],
)
def test_no_token_changes(tmp_path, family, ranks, more):
    """16 prompts, 64 greedy tokens each; prompts are chunked, and all prefill beside decode."""
    plan = make_plan(tmp_path, family, ranks, **more)
    results = run_world(tmp_path / "world", ranks, generate, plan, 16 // ranks)
    for rank, result in enumerate(results):
        assert result.wrong == []
        assert {len(t) for t in result.still.values()} == {TOKENS}
        for moving in result.moving:
            assert moving == result.still, rank
        assert result.aborted == 0
        # Every other step or so commits a layer: one begins it, the next ones stage it.
        assert result.epochs >= result.steps / 8, result
    assert results[0].begun > 6
