"""Rebalances of every kind, one after the other, change no token, and slots always hold what the map says."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.collectives import Collective
from tests.end_to_end.commands import write_plan
from tests.engine.balancing.live import Forced, checksums, prompts
from tests.engine.instance import never_park, run_requests, start
from tests.expert_parallel.world import Rank, run_world

pytestmark = pytest.mark.multiproc
TOKENS = 64
FULL = pytest.mark.soak


SURE = {"deterministic": True}
IN_SLOTS = {"shared_experts": "slots", "dispatch": {"mode": "low_latency"}}


def make_plan(folder: Path, family: str, ranks: int, *, pipeline: int = 0, **more: object) -> Path:
    make_checkpoint(folder / family, family=family, size="tiny")
    unified = {
        "expert_parallel": ranks,
        "redundant_experts": 4,
        "scheduler": {
            "max_batch_tokens": 64,
            "chunk_tokens": 12,
            "max_sequences": 8,
            "pipeline_depth": pipeline,
        },
        "kv_cache": {"blocks": 128, "prefix_cache": False},
        "balancing": {"enabled": True, "interval_tokens": 1 << 40},
        **more,
    }
    return write_plan(folder / "plan.yaml", folder / family, {"unified": unified})


class Result(NamedTuple):
    still: dict[int, list]
    moving: list[dict[int, list]]
    same_logprobs: bool
    begun: int
    epochs: int
    steps: int
    wrong: list[str]
    recorded: bool
    aborted: int
    collectives: list[Collective]


@torch.inference_mode()
def generate(rank: Rank, plan: Path, count: int, tokens: int) -> Result:
    """This rank's prompts with experts at rest, then with experts moving: whole steps, and split ones."""
    driven = start(rank, plan)
    never_park(driven)
    driven.engine.warm_up()
    forced = Forced(driven, checksums(driven))
    forced.install()
    requests = [(p, tokens) for p in prompts(rank.rank, count, range(8, 500))]
    still = run_requests(driven, requests)
    forced.on, first = True, driven.engine.step_number
    moving = [run_requests(driven, requests, micro_batches=n) for n in (1, 2)]
    balancing = driven.engine.balancing
    assert balancing is not None
    log = driven.engine.desk.log.take()
    recorded = [forced.epochs.get(step, 0) for step in log.step.tolist()] == log.placement_epoch.tolist()
    recorded = recorded and bool(log.placement_epoch[-1] > 1)
    result = Result(
        still.tokens,
        [done.tokens for done in moving],
        all(done.logprobs == still.logprobs for done in moving),
        forced.begun,
        balancing.epoch,
        driven.engine.step_number - first,
        forced.wrong,
        recorded,
        balancing.mover.aborted,
        driven.collectives,
    )
    driven.close()
    return result


@pytest.mark.parametrize(
    ("family", "ranks", "more", "count", "tokens"),
    [
        pytest.param("deepseek_v3", 4, {}, 16, TOKENS, id="4 ranks"),
        pytest.param("qwen3_moe", 2, SURE, 6, 24, id="2 ranks, deterministic, few"),
        pytest.param("qwen3_moe", 2, SURE, 16, TOKENS, id="2 ranks, deterministic", marks=FULL),
        pytest.param("deepseek_v3", 2, IN_SLOTS, 6, 24, id="2 ranks, shared experts in slots, few"),
        pytest.param("deepseek_v3", 2, IN_SLOTS, 16, TOKENS, id="2 ranks, shared in slots", marks=FULL),
        pytest.param("deepseek_v3", 4, {"pipeline": 1}, 16, TOKENS, id="4 ranks, depth 1", marks=FULL),
    ],
)
def test_no_token_changes(tmp_path, family, ranks, more, count, tokens):
    """Greedy tokens; prompts are chunked, and some prefill while others decode. `deterministic`: bit for bit,
    as the logprobs of all tokens are compared too."""
    plan = make_plan(tmp_path, family, ranks, **more)
    results = run_world(tmp_path / "world", ranks, generate, plan, count // ranks, tokens)
    for rank, result in enumerate(results):
        assert result.wrong == []
        assert result.collectives == results[0].collectives
        assert {len(t) for t in result.still.values()} == {tokens}
        for moving in result.moving:
            assert moving == result.still, rank
        assert result.same_logprobs or not more.get("deterministic")
        assert result.aborted == 0
        # Every other step or so commits a layer: one begins it, the next ones stage it.
        assert result.epochs >= result.steps / 8, result
        assert result.recorded, "the step log names the placement each step ran with"
    assert results[0].begun >= 6
